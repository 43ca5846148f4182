"""Build the configured algorithm."""

from __future__ import annotations

import importlib
from typing import cast

from trainer.algorithms.base import Algorithm
from trainer.algorithms.reference_kl import WithReferenceKl
from trainer.algorithms.registry import target_of
from trainer.config import TrainerConfig


def make(config: TrainerConfig) -> Algorithm:
    """The configured algorithm, with the KL penalty where `kl_coefficient` is above 0.

    Raises:
        ImportError, AttributeError: the registered target does not exist.
    """
    module, _, name = target_of(config.algorithm).partition(":")
    made = getattr(importlib.import_module(module), name).from_config(config)
    algorithm = cast("Algorithm", made)
    if config.kl_coefficient > 0:
        return WithReferenceKl(algorithm, config.kl_coefficient)
    return algorithm
