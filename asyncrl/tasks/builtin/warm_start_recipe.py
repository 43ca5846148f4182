"""What determines the built-in model.

It imports no torch, which takes seconds: a cached model is found by its recipe alone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Everything that determines the built-in model. A cached model is keyed by its hash."""

    hidden_size: int = 128
    intermediate_size: int = 256
    layers: int = 2
    heads: int = 2
    head_dim: int = 64
    digits: tuple[int, int] = (2, 3)
    steps: int = 600
    """Optimizer steps."""
    batch_size: int = 32
    """Worked examples per step."""
    learning_rate: float = 4e-3
    """Peak; linear warm-up over `warmup_steps`, linear decay over the second half."""
    warmup_steps: int = 30
    beta2: float = 0.95
    weight_decay: float = 0.01
    clean_share: float = 0.75
    """Share of the steps without slips."""
    slip: float = 0.11
    """Probability of a slip per column in the steps after that."""
    seed: int = 2
    dev_problems: int = 512
    """Number of training-side problems on which the sampled accuracy is measured."""
    expected: tuple[float, float] = (0.58, 0.78)
    """Range of the sampled accuracy at the end. Below it, steps are added."""
    extra_rounds: int = 3
    """Most rounds of `extra_steps` that are added while the accuracy is below `expected`."""
    extra_steps: int = 60
    """Optimizer steps of one such round."""
    version: int = 1
    """Increased when a code change makes the same numbers lead to another model."""
    task: Literal["arithmetic", "agent"] = "arithmetic"
    """Which model: it decides the vocabulary and what is imitated."""


POSITIONS = 512
"""Longest sequence of a built-in model."""

RECIPE = WarmStart()
AGENT_RECIPE = WarmStart(task="agent", steps=1000, digits=(2, 3), expected=(0.0, 1.0))
"""Of `builtin:agent`, which plays the built-in environments carelessly."""
MINIATURE = WarmStart(
    hidden_size=32,
    intermediate_size=32,
    heads=1,
    head_dim=32,
    steps=4,
    batch_size=4,
    dev_problems=8,
    expected=(0.0, 1.0),
)
"""The built-in model in miniature: trained in a moment, and wrong about everything."""


def recipe_fields(recipe: WarmStart) -> dict[str, Any]:
    """The recipe as plain values, for its hash and for the record saved with the model."""
    fields = dataclasses.asdict(recipe)
    if recipe.task == "arithmetic":  # the model is older than the field
        del fields["task"]
    return fields
