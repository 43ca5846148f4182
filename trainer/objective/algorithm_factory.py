"""Build the configured algorithm."""

from __future__ import annotations

from typing import cast

from asyncrl.trainer import corrections
from asyncrl.trainer.algorithms.base import Algorithm
from asyncrl.trainer.algorithms.reference_kl import WithReferenceKl
from asyncrl.trainer.algorithms.router_balance import WithRouterBalance
from asyncrl.trainer.base.algorithm_registry import class_of
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.corrections.apply import Corrected


def make(config: TrainerConfig) -> Algorithm:
    """The configured algorithm, with its correction, and the KL penalty if there is one.

    Raises:
        ImportError, AttributeError: the registered target does not exist.
    """
    made = class_of(config.algorithm).from_config(config)
    algorithm: Algorithm = Corrected(
        cast("Algorithm", made),
        corrections.make(config),
        config.log_ratio_clamp,
        weighs=config.proximal_policy == "current",
    )
    if config.router_loss_coefficient > 0:
        algorithm = WithRouterBalance(algorithm, config.router_loss_coefficient)
    if config.kl_coefficient > 0:
        return WithReferenceKl(
            algorithm, config.kl_coefficient, config.kl_estimator, config.kl_clamp
        )
    return algorithm
