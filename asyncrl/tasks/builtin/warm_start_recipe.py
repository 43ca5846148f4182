"""The recipe of a built-in model, without torch, because it alone finds a cached model."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class WarmStart:
    """All parameters of a built-in model. A cached model is keyed by their hash."""

    hidden_size: int = 128
    intermediate_size: int = 256
    layers: int = 2
    heads: int = 2
    head_dim: int = 64
    digits: tuple[int, int] = (2, 3)
    steps: int = 600
    batch_size: int = 32
    learning_rate: float = 4e-3
    """Peak, after linear warm-up over `warmup_steps`; linear decay over the second half."""
    warmup_steps: int = 30
    beta2: float = 0.95
    weight_decay: float = 0.01
    clean_share: float = 0.75
    slip: float = 0.11
    """Probability of a slip per column in the later steps."""
    seed: int = 2
    dev_problems: int = 512
    """Number of training-side problems for measuring the sampled accuracy."""
    expected: tuple[float, float] = (0.58, 0.78)
    """Range of the final sampled accuracy. Below it, steps are added."""
    extra_rounds: int = 3
    """Maximum number of `extra_steps` rounds while the accuracy is below `expected`."""
    extra_steps: int = 60
    version: int = 2
    """Increased when a code change gives another model for the same numbers."""
    task: Literal["arithmetic", "agent"] = "arithmetic"


POSITIONS = 512

RECIPE = WarmStart()
AGENT_RECIPE = WarmStart(task="agent", steps=1000, digits=(2, 3), expected=(0.0, 1.0))
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
"""A miniature, trained in a moment, which answers everything wrong."""


def recipe_fields(recipe: WarmStart) -> dict[str, Any]:
    """Return the recipe as plain values, for its hash and the record saved with the model."""
    fields = dataclasses.asdict(recipe)
    if recipe.task == "arithmetic":  # the model is older than the field
        del fields["task"]
    return fields
