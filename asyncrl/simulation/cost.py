"""Costs of decoding, scoring and training: from a roofline, or as measured in a run.

Roofline: a decode step of n rows reads all weights and the KV of the rows, and multiplies n tokens
with all weights. It takes the longer of the two times, plus a constant. Tokens of prompts and
tokens to verify are fed in a step of the rows that decode, so they cost only the arithmetic for
which the step would have no time. A training token costs three times a scored one: the forward
pass, and twice that for the backward pass.

Measured (`asyncrl.simulation.fit` makes it from the records of a run): a step costs a constant plus
a constant per token fed. The number of tokens that a row gains in a step, by drafting from the
cache, is a function of the number of rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.errors import UserError


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: the peaks of its data sheet, and the share of each that is reached."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    """Dense, in the data type of the computation."""
    memory_bytes: float
    """For weights, keys and values."""
    memory_efficiency: float = 0.7
    compute_efficiency: float = 0.5


@dataclass(frozen=True, slots=True)
class Model:
    """The numbers of a dense transformer that its cost depends on."""

    name: str
    parameters: float
    kv_bytes_per_token: float
    """Bytes of the keys and values of all layers."""
    bytes_per_parameter: float = 2.0


H200 = Device("H200", 4.8e12, 9.89e14, 141e9)
"""From the data sheet: 141 GB, 4.8 TB/s, 989 TFLOP/s in bfloat16 without sparsity."""
H100 = Device("H100", 3.35e12, 9.89e14, 80e9)
"""From the data sheet (SXM): 80 GB, 3.35 TB/s, 989 TFLOP/s in bfloat16 without sparsity."""

DEVICES = {"h200": H200, "h100": H100}
MODELS = {
    # KV: 2 (k, v) * layers * key-value heads * 128 * 2 bytes, from Qwen2.5's configurations.
    "1.5b": Model("1.5B", 1.54e9, 2 * 28 * 2 * 128 * 2),
    "7b": Model("7B", 7.6e9, 2 * 28 * 4 * 128 * 2),
    "32b": Model("32B", 32.5e9, 2 * 64 * 8 * 128 * 2),
}


MAX_DRAFTS = 16
"""Maximum number of tokens that a row drafts in one step."""


def tokens_per_step(acceptance: float, drafts: int) -> float:
    """Expected tokens of a row in a step in which it drafts a chain of `drafts` tokens.

    Args:
        acceptance: chance that a drafted token is accepted, given that those before it are.
        drafts: length of the chain.
    """
    a = acceptance
    return 1.0 + (a * (1 - a**drafts) / (1 - a) if a < 1 else drafts)


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs from a roofline."""

    memory_seconds: float
    """Seconds to read all weights once."""
    token_seconds: float
    """Seconds of the arithmetic of one token."""
    kv_seconds: float
    """Seconds to read the KV of one token of context."""
    step_seconds: float
    """Constant seconds of a step."""
    train_token_seconds: float
    """Seconds of a token in training, on all devices of the trainer together."""
    swap_seconds: float
    """Seconds in which a generator installs new weights and decodes nothing."""
    stage_seconds: float = 0.0
    """Seconds in which a generator receives new weights while it decodes."""
    optimizer_seconds: float = 0.0
    """Seconds of the trainer after the last token of a step."""
    message_seconds: float = 1e-3

    def decode(self, rows: float, context: float, drafting: int = 0) -> float:
        """Seconds of a decode step.

        Drafts of old continuations use the free arithmetic; no other drafts are modelled.

        Args:
            rows: number of rows that decode.
            context: tokens attended to, all rows together.
            drafting: number of rows that draft from an old continuation of their own.
        """
        fed = rows
        if drafting:
            fed = max(fed, min(rows + MAX_DRAFTS * drafting, int(self.free_tokens)))
        return self.step(fed, context)

    def step(self, fed: float, context: float) -> float:
        """Seconds of an engine step.

        Args:
            fed: tokens fed, those of prompts, of drafts and to be verified included.
            context: tokens attended to by the rows that decode, all rows together.
        """
        read = self.memory_seconds + self.kv_seconds * context
        return self.step_seconds + max(read, self.token_seconds * fed)

    def speed(self, rows: float) -> float:  # noqa: ARG002 - no other drafting is modelled
        """Tokens that a row gains in a step by drafting from the cache, which is not modelled."""
        return 1.0

    def redraft(self, rows: int, drafting: int, acceptance: float) -> float:
        """Tokens that a row gains in a step while it drafts from its old continuation.

        Args:
            rows: number of rows that decode.
            drafting: number of other rows that draft from old continuations; all of them share the
                free tokens.
            acceptance: chance that a drafted token is accepted.
        """
        free = max(0.0, self.free_tokens - rows) / (drafting + 1)
        return tokens_per_step(acceptance, int(min(MAX_DRAFTS, free)))

    def prefill(self, tokens: float, rows: float, context: float) -> float:
        """Seconds by which a decode step is longer that also feeds these tokens.

        That is their arithmetic beyond what the step has time for while it reads the weights.

        Args:
            tokens: of prompts, or to be verified.
            rows: number of rows that decode in the step.
            context: tokens attended to by these rows.
        """
        alone = self.step(rows, context) if rows else 0.0
        return self.step(rows + tokens, context) - alone

    def reward(self, rows: int) -> float:  # noqa: ARG002
        """Seconds of the reward of one sample while so many rows decode; not modelled."""
        return 0.0

    @property
    def free_tokens(self) -> float:
        """Tokens that a step may feed before arithmetic costs more than reading the weights."""
        return self.memory_seconds / self.token_seconds


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Costs as measured in a run."""

    step_seconds: float
    """Constant seconds of a step."""
    token_seconds: float
    """Seconds of each token fed, drafts included."""
    rows: tuple[float, ...]
    """Rows per step at which `speeds` and `fed` were measured, ascending."""
    speeds: tuple[float, ...]
    """Tokens that a row gained in a step."""
    fed: tuple[float, ...]
    """Tokens fed per row and step, drafts included."""
    train_token_seconds: float
    """Seconds of a token in training."""
    optimizer_seconds: float
    """Seconds of the trainer after the last token of a step, publication included."""
    swap_seconds: float
    """Seconds in which a generator installs new weights."""
    message_seconds: float
    """Seconds of a message from one process to another."""
    reward_seconds: float
    """Seconds of one sample's reward while the engine is idle."""
    reward_steps: float
    """Engine steps during one reward while the engine decodes; both share an event loop."""
    stage_seconds: float = 0.0
    """Seconds of staging. A fit cannot tell them from those of the messages before."""

    def decode(self, rows: float, context: float, drafting: int = 0) -> float:  # noqa: ARG002
        """The context is ignored: attention at the run's context lengths is in the constants."""
        return self.step_seconds + self.token_seconds * rows * _between(self.rows, self.fed, rows)

    def speed(self, rows: float) -> float:
        """Interpolated between the measured numbers of rows."""
        return _between(self.rows, self.speeds, rows)

    def redraft(self, rows: int, drafting: int, acceptance: float) -> float:  # noqa: ARG002
        """As many drafts as rows had in the run, but with the given acceptance."""
        drafts = _between(self.rows, self.fed, rows) - 1.0
        return max(self.speed(rows), tokens_per_step(acceptance, round(drafts)))

    def prefill(self, tokens: float, rows: float, context: float) -> float:  # noqa: ARG002
        """Per token only."""
        return self.token_seconds * tokens

    def reward(self, rows: int) -> float:
        """As measured while samples waited for their rewards."""
        if not rows:
            return self.reward_seconds
        return max(self.reward_seconds, self.reward_steps * self.decode(rows, 0.0))


Costs = Cost | MeasuredCost
"""Seconds of what generators and trainer do."""


def _between(at: Sequence[float], values: Sequence[float], x: float) -> float:
    """Interpolate linearly between the points; constant beyond them."""
    i = bisect_left(at, x)
    if i == 0 or i == len(at):
        return values[min(i, len(at) - 1)]
    share = (x - at[i - 1]) / (at[i] - at[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])


_USABLE = 0.9
"""Share of a device's memory that weights, keys and values may take."""


def kv_tokens(model: Model, device: Device, *, devices: int = 1) -> float:
    """Tokens whose keys and values a generator of so many devices has room for.

    Raises:
        UserError: the weights do not fit.
    """
    left = _USABLE * device.memory_bytes * devices - model.parameters * model.bytes_per_parameter
    if left <= 0:
        raise UserError(f"the weights of {model.name} do not fit {devices} {device.name}")
    return left / model.kv_bytes_per_token


def roofline(
    model: Model,
    device: Device,
    *,
    trainer_devices: float,
    devices_per_generator: int = 1,
    step_seconds: float = 2e-3,
    swap_seconds: float = 1.0,
) -> Cost:
    """The costs of a model.

    Args:
        model: what is trained.
        device: the accelerator of generators and trainer.
        trainer_devices: number of devices of the trainer.
        devices_per_generator: number of devices of each generator.
        step_seconds: constant seconds of a decode step.
        swap_seconds: seconds in which a generator installs new weights.

    Raises:
        UserError: the trainer has no device.
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
