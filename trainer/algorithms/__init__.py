"""Algorithms by name. One algorithm, one small file; looked up lazily, so this imports no torch.

Add one with `register("mine", "my_package.my_module:Mine")`, where `Mine.from_config(config)`
returns a `trainer.algorithms.base.Algorithm`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from trainer.algorithms.base import Algorithm
    from trainer.config import TrainerConfig

_TARGETS = {
    "grpo": "trainer.algorithms.grpo:Grpo",
    "reinforce": "trainer.algorithms.reinforce:Reinforce",
}


def known_algorithms() -> tuple[str, ...]:
    """Names that `trainer.algorithm` may take, sorted."""
    return tuple(sorted(_TARGETS))


def register(name: str, target: str) -> None:
    """Make `target` ("module:Class") known as `name`.

    Raises:
        ValueError: the name is taken by another target, or the target has no class part.
    """
    if _TARGETS.get(name, target) != target:
        raise ValueError(f"algorithm {name!r} is already registered as {_TARGETS[name]}")
    if target.count(":") != 1:
        raise ValueError(f"algorithm target {target!r} is not of the form module:Class")
    _TARGETS[name] = target


def make(config: TrainerConfig) -> Algorithm:
    """The configured algorithm. Raises ImportError or AttributeError for a broken target."""
    module, _, name = _TARGETS[config.algorithm].partition(":")
    return cast("Algorithm", getattr(importlib.import_module(module), name).from_config(config))
