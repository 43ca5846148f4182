"""What decoding, scoring and training cost: from bytes and operations, or as it was measured.

Roofline: a decode step of n rows reads all weights and the rows' KV, and multiplies n tokens with
all weights; it takes the longer of the two, plus a constant. Scoring T tokens is arithmetic only.
A training token costs three times a scored one (forward, and twice that backward).

Measured (`asyncrl.simulation.fit` makes it from a run's records): a step costs a constant and so
much for each token fed, and how many tokens a row gets of a step, as it drafts from the cache,
follows the number of rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.errors import UserError


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator; `efficiency` is the share of each peak that is reached."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    """Dense, in the type that is computed in."""
    memory_efficiency: float = 0.7
    compute_efficiency: float = 0.5


@dataclass(frozen=True, slots=True)
class Model:
    """A dense transformer as its cost."""

    name: str
    parameters: float
    kv_bytes_per_token: float
    """Keys and values of all layers."""
    bytes_per_parameter: float = 2.0


H200 = Device("H200", 4.8e12, 9.89e14)
"""Data sheet: 4.8 TB/s, 989 TFLOP/s in bfloat16 without sparsity."""

DEVICES = {"h200": H200}
MODELS = {
    # KV: 2 (k, v) * layers * key-value heads * 128 * 2 bytes, from Qwen2.5's configurations.
    "1.5b": Model("1.5B", 1.54e9, 2 * 28 * 2 * 128 * 2),
    "7b": Model("7B", 7.6e9, 2 * 28 * 4 * 128 * 2),
    "32b": Model("32B", 32.5e9, 2 * 64 * 8 * 128 * 2),
}


class Costs(Protocol):
    """Seconds of a generator and a trainer; what the simulator asks of either kind of cost."""

    @property
    def train_token_seconds(self) -> float:
        """Of the whole trainer, however many devices it has."""

    @property
    def optimizer_seconds(self) -> float:
        """Of the trainer, after a step's last token."""

    @property
    def swap_seconds(self) -> float:
        """A generator takes new weights."""

    @property
    def message_seconds(self) -> float:
        """From one process to another."""

    def decode(self, rows: float, context: float, drafting: int) -> float:
        """Seconds of a step.

        Args:
            rows: that decode.
            context: tokens attended to, all rows together.
            drafting: rows that draft from an old continuation of their own.
        """

    def speed(self, rows: float) -> float:
        """Tokens that a row gets of a step with so many rows, by drafting from the cache."""

    def redraft(self, rows: int, drafting: int, acceptance: float) -> float:
        """Tokens that a row gets of a step while it drafts from its old continuation."""

    def score(self, tokens: float) -> float:
        """Seconds to score so many tokens in one pass."""

    def reward(self, rows: int) -> float:
        """Seconds of one sample's reward; a generator's samples get theirs one after the other.

        Args:
            rows: that the generator decodes meanwhile; it has other things to do then.
        """


MOST_DRAFTS = 16
"""Tokens that a row drafts in one step, at most."""


def accepted(acceptance: float, drafts: int) -> float:
    """Tokens of a step whose row drafts so many, each accepted with this chance."""
    a = acceptance
    return 1.0 + (a * (1 - a**drafts) / (1 - a) if a < 1 else drafts)


@dataclass(frozen=True, slots=True)
class Cost:
    """The roofline's seconds."""

    memory_seconds: float
    """To read all weights once."""
    token_seconds: float
    """Arithmetic of one token."""
    kv_seconds: float
    """To read one token of context."""
    step_seconds: float
    """What a step costs besides."""
    train_token_seconds: float
    """Of the whole trainer, however many devices it has."""
    swap_seconds: float
    """A generator takes new weights."""
    optimizer_seconds: float = 0.0
    """Of the trainer, after a step's last token."""

    message_seconds: float = 1e-3

    def decode(self, rows: float, context: float, drafting: int = 0) -> float:
        """Old continuations fill what arithmetic is free; other drafts are left out."""
        fed = rows
        if drafting:
            fed = max(fed, min(rows + MOST_DRAFTS * drafting, int(self.free_tokens)))
        read = self.memory_seconds + self.kv_seconds * context
        return self.step_seconds + max(read, self.token_seconds * fed)

    def speed(self, rows: float) -> float:  # noqa: ARG002 - other drafting is left out
        """One token."""
        return 1.0

    def redraft(self, rows: int, drafting: int, acceptance: float) -> float:
        """The free tokens are shared among the rows that draft."""
        free = max(0.0, self.free_tokens - rows) / (drafting + 1)
        return accepted(acceptance, int(min(MOST_DRAFTS, free)))

    def score(self, tokens: float) -> float:
        """Arithmetic, but at least one reading of the weights."""
        return max(self.memory_seconds, self.token_seconds * tokens)

    def reward(self, rows: int) -> float:  # noqa: ARG002
        """Rewards are left out."""
        return 0.0

    @property
    def free_tokens(self) -> float:
        """Tokens that a step may feed before arithmetic costs more than reading the weights."""
        return self.memory_seconds / self.token_seconds


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """As seen in a run."""

    step_seconds: float
    """A step's constant."""
    token_seconds: float
    """Of each token fed, drafts included."""
    rows: tuple[float, ...]
    """Rows per step at which the next two were seen, rising."""
    speeds: tuple[float, ...]
    """Tokens that a row got of a step."""
    fed: tuple[float, ...]
    """Tokens that a step fed for each row, drafts included."""
    train_token_seconds: float
    optimizer_seconds: float
    swap_seconds: float
    message_seconds: float
    reward_seconds: float
    """Of a sample, while the engine rests."""
    reward_steps: float
    """Steps of the engine that go by meanwhile while it decodes: they share an event loop."""

    def decode(self, rows: float, context: float, drafting: int = 0) -> float:  # noqa: ARG002
        """Attention is in the constants: a run's contexts are what they are."""
        return self.step_seconds + self.token_seconds * rows * _between(self.rows, self.fed, rows)

    def speed(self, rows: float) -> float:
        """Between what was seen."""
        return _between(self.rows, self.speeds, rows)

    def redraft(self, rows: int, drafting: int, acceptance: float) -> float:  # noqa: ARG002
        """As many drafts as rows had, of a better text."""
        drafts = _between(self.rows, self.fed, rows) - 1.0
        return max(self.speed(rows), accepted(acceptance, round(drafts)))

    def score(self, tokens: float) -> float:
        """It rides on a step of the decoding rows."""
        return self.token_seconds * tokens

    def reward(self, rows: int) -> float:
        """As seen while samples waited for theirs."""
        if not rows:
            return self.reward_seconds
        return max(self.reward_seconds, self.reward_steps * self.decode(rows, 0.0))


def _between(at: Sequence[float], values: Sequence[float], x: float) -> float:
    """Linear between the points, constant beyond them."""
    i = bisect_left(at, x)
    if i == 0 or i == len(at):
        return values[min(i, len(at) - 1)]
    share = (x - at[i - 1]) / (at[i] - at[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])


def roofline(
    model: Model,
    device: Device,
    *,
    trainer_devices: float,
    devices_per_generator: int = 1,
    step_seconds: float = 2e-3,
    swap_seconds: float = 1.0,
) -> Cost:
    """The cost of a model on generators of so many devices each, and on a trainer.

    Raises:
        UserError: there is no trainer.
    """
    if trainer_devices <= 0:
        raise UserError("the simulated trainer needs at least one device")
    compute = device.flops_per_second * device.compute_efficiency
    memory = device.bytes_per_second * device.memory_efficiency * devices_per_generator
    token = 2 * model.parameters / (compute * devices_per_generator)
    return Cost(
        memory_seconds=model.parameters * model.bytes_per_parameter / memory,
        token_seconds=token,
        kv_seconds=model.kv_bytes_per_token / memory,
        step_seconds=step_seconds,
        train_token_seconds=6 * model.parameters / (compute * trainer_devices),
        swap_seconds=swap_seconds,
    )
