"""What decoding, scoring and training cost, from bytes and operations.

Roofline: a decode step of n rows reads all weights and the rows' KV, and multiplies n tokens with
all weights; it takes the longer of the two, plus a constant. Scoring T tokens is arithmetic only.
A training token costs three times a scored one (forward, and twice that backward).
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one generator, and of the trainer per token."""

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

    def decode(self, rows: float, context: float) -> float:
        """Seconds of a step that feeds one token of each row.

        Args:
            rows: fed tokens.
            context: tokens attended to, all rows together.
        """
        read = self.memory_seconds + self.kv_seconds * context
        return self.step_seconds + max(read, self.token_seconds * rows)

    def score(self, tokens: float) -> float:
        """Seconds to score so many tokens in one pass."""
        return max(self.memory_seconds, self.token_seconds * tokens)

    @property
    def free_tokens(self) -> float:
        """Tokens that a step may feed before arithmetic costs more than reading the weights."""
        return self.memory_seconds / self.token_seconds


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
