"""Costs of decoding, scoring and training: from a roofline, or as measured in a run."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.errors import UserError

MAX_DRAFTS = 16
_USABLE = 0.9
"""Share of a device's memory for weights and KV."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: the peaks of its data sheet, and the reached share of each."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    """Dense, in the data type of the computation."""
    memory_bytes: float
    memory_efficiency: float = 0.7
    compute_efficiency: float = 0.5


@dataclass(frozen=True, slots=True)
class Model:
    """The numbers of a dense transformer that its cost depends on."""

    name: str
    parameters: float
    kv_bytes_per_token: float
    bytes_per_parameter: float = 2.0


H200 = Device("H200", 4.8e12, 9.89e14, 141e9)
"""141 GB, 4.8 TB/s, 989 TFLOP/s in bfloat16 without sparsity, by the data sheet."""
H100 = Device("H100", 3.35e12, 9.89e14, 80e9)
"""80 GB, 3.35 TB/s, 989 TFLOP/s in bfloat16 without sparsity, by the data sheet (SXM)."""

DEVICES = {"h200": H200, "h100": H100}
MODELS = {
    # KV: 2 (k, v) * layers * key-value heads * 128 * 2 bytes, from Qwen2.5's configurations.
    "1.5b": Model("1.5B", 1.54e9, 2 * 28 * 2 * 128 * 2),
    "7b": Model("7B", 7.6e9, 2 * 28 * 4 * 128 * 2),
    "32b": Model("32B", 32.5e9, 2 * 64 * 8 * 128 * 2),
}


def tokens_per_step(acceptance: float, drafts: int) -> float:
    """Return a row's expected tokens in a step with a chain of `drafts` of this acceptance each."""
    a = acceptance
    return 1.0 + (a * (1 - a**drafts) / (1 - a) if a < 1 else drafts)


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs from a roofline."""

    memory_seconds: float
    """Seconds to read all weights once."""
    token_seconds: float
    kv_seconds: float
    """Seconds to read the KV of one token of context."""
    step_seconds: float
    """Constant seconds of a decode step."""
    train_token_seconds: float
    """Seconds of a token in training, on all devices of the trainer together."""
    swap_seconds: float
    """Seconds in which a generator installs new weights and does not decode."""
    stage_seconds: float = 0.0
    """Seconds in which a generator receives new weights while it decodes."""
    optimizer_seconds: float = 0.0
    """Seconds of the trainer after the last token of a step."""
    message_seconds: float = 1e-3

    def decode(self, rows: float, context: float, drafting: int = 0) -> float:
        """Return the seconds of a decode step with `rows` rows that attend to `context` tokens."""
        fed = rows
        if drafting:
            fed = max(fed, min(rows + MAX_DRAFTS * drafting, int(self.free_tokens)))
        return self.step(fed, context)

    def step(self, fed: float, context: float) -> float:
        """Return the seconds of an engine step with `fed` tokens, drafts included."""
        read = self.memory_seconds + self.kv_seconds * context
        return self.step_seconds + max(read, self.token_seconds * fed)

    def speed(self, rows: float) -> float:  # noqa: ARG002 - no other drafting is modelled
        """Return a row's tokens per step with drafts from the cache, which are not modelled."""
        return 1.0

    def redraft(self, rows: int, drafting: int, acceptance: float) -> float:
        """Return a row's tokens per step while it drafts from its old continuation.

        `rows` rows decode and `drafting` others draft; all share the free tokens.
        """
        free = max(0.0, self.free_tokens - rows) / (drafting + 1)
        return tokens_per_step(acceptance, int(min(MAX_DRAFTS, free)))

    def prefill(self, tokens: float, rows: float, context: float) -> float:
        """Return the seconds that `tokens` add to a decode step, beyond its spare arithmetic."""
        alone = self.step(rows, context) if rows else 0.0
        return self.step(rows + tokens, context) - alone

    def reward(self, rows: int) -> float:  # noqa: ARG002
        """Return the seconds of a sample's reward while `rows` rows decode; not modelled."""
        return 0.0

    @property
    def free_tokens(self) -> float:
        """Tokens that a step may feed before arithmetic costs more than reading the weights."""
        return self.memory_seconds / self.token_seconds


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Costs measured in a run."""

    step_seconds: float
    token_seconds: float
    """Seconds per token fed, drafts included."""
    rows: tuple[float, ...]
    speeds: tuple[float, ...]
    """Tokens that a row gained in a step."""
    fed: tuple[float, ...]
    """Tokens fed per row and step, drafts included."""
    train_token_seconds: float
    optimizer_seconds: float
    """Seconds of the trainer after the last token of a step, publication included."""
    swap_seconds: float
    message_seconds: float
    reward_seconds: float
    """Seconds of one sample's reward while the engine is idle."""
    reward_steps: float
    """Engine steps during one reward while the engine decodes; both share an event loop."""
    stage_seconds: float = 0.0
    """Seconds of staging. A fit cannot distinguish them from those of the messages before."""

    def decode(self, rows: float, context: float, drafting: int = 0) -> float:  # noqa: ARG002
        """Ignore the context: attention at the run's context lengths is in the constants."""
        return self.step_seconds + self.token_seconds * rows * _between(self.rows, self.fed, rows)

    def speed(self, rows: float) -> float:
        """Interpolate between the measured numbers of rows."""
        return _between(self.rows, self.speeds, rows)

    def redraft(self, rows: int, drafting: int, acceptance: float) -> float:  # noqa: ARG002
        """Use the run's number of drafts per row, but the given acceptance."""
        drafts = _between(self.rows, self.fed, rows) - 1.0
        return max(self.speed(rows), tokens_per_step(acceptance, round(drafts)))

    def prefill(self, tokens: float, rows: float, context: float) -> float:  # noqa: ARG002
        """Charge per token only."""
        return self.token_seconds * tokens

    def reward(self, rows: int) -> float:
        """Return the time measured while samples waited for their rewards."""
        if not rows:
            return self.reward_seconds
        return max(self.reward_seconds, self.reward_steps * self.decode(rows, 0.0))


Costs = Cost | MeasuredCost


def _between(at: Sequence[float], values: Sequence[float], x: float) -> float:
    i = bisect_left(at, x)
    if i == 0 or i == len(at):
        return values[min(i, len(at) - 1)]
    share = (x - at[i - 1]) / (at[i] - at[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])


def kv_tokens(model: Model, device: Device, *, devices: int = 1) -> float:
    """Return the KV capacity of a generator in tokens. Raises UserError if weights do not fit."""
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
    swap_seconds: float = 1.0,
) -> Cost:
    """Compute a model's costs; generators and trainer have the same device. Raises UserError."""
    if trainer_devices <= 0:
        raise UserError("the simulated trainer needs at least one device")
    compute = device.flops_per_second * device.compute_efficiency
    memory = device.bytes_per_second * device.memory_efficiency * devices_per_generator
    token = 2 * model.parameters / (compute * devices_per_generator)
    return Cost(
        memory_seconds=model.parameters * model.bytes_per_parameter / memory,
        token_seconds=token,
        kv_seconds=model.kv_bytes_per_token / memory,
        step_seconds=2e-3,
        train_token_seconds=6 * model.parameters / (compute * trainer_devices),
        swap_seconds=swap_seconds,
    )
