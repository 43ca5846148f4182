"""Which settings of a loss go together. Light to import: no torch."""

from __future__ import annotations

from typing import Any

from asyncrl.trainer.base.algorithm_registry import only_values_of, unused_by


def refuse_what_does_not_fit(config: Any) -> None:
    """Raise ValueError for settings that contradict the algorithm, or that its loss does not read.

    `config` is a `TrainerConfig`, whose module imports this one.

    Settings that have their default pass: a run's resolved configuration names all of them.
    """
    _of_algorithm(config)
    _of_correction(config)
    _of_dual_clip(config)


def _of_algorithm(config: Any) -> None:
    for name, value in only_values_of(config.algorithm).items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name}: {getattr(config, name)} does not fit algorithm: {config.algorithm}; its "
                f"equation has only {name}: {value} (docs/algorithms.md). Leave it out"
            )
    for name in unused_by(config.algorithm):
        if _is_set(config, name):
            raise ValueError(
                f"{name}: {getattr(config, name)} has no effect with algorithm: "
                f"{config.algorithm}, which clips nothing; leave it out"
            )
    if config.algorithm == "gpg" and config.kl_estimator == "k1" and config.kl_coefficient > 0:
        raise ValueError(
            "kl_estimator: k1 is part of the advantages, which algorithm: gpg multiplies by "
            "groups / groups with signal, so the penalty would grow with the groups without "
            "signal and vanish in a step without any signal; choose k2 or k3"
        )


def _of_correction(config: Any) -> None:
    in_loss = config.proximal_policy == "behaviour"
    if in_loss and config.correction == "sequence_truncated":
        raise ValueError(
            "correction: sequence_truncated is a weight, but with proximal_policy: behaviour "
            f"the loss of {config.algorithm} holds the ratio already; choose sequence_masked, "
            "sequence_rejected, token_masked or none"
        )
    if _is_set(config, "importance_cap"):
        if in_loss:
            raise ValueError(
                f"importance_cap: {config.importance_cap} has no effect with proximal_policy: "
                "behaviour, whose loss holds the ratio; leave it out. PPO's dual clip is dual_clip"
            )
        if not config.correction.endswith(("truncated", "rejected")):
            raise ValueError(
                f"importance_cap: {config.importance_cap} has no effect with correction: "
                f"{config.correction}, which truncates nothing; leave it out"
            )
    if config.correction_band is not None and not config.correction.endswith(
        ("masked", "rejected")
    ):
        raise ValueError(
            f"correction_band has no effect with correction: {config.correction}; it is for "
            "token_masked, sequence_masked and sequence_rejected"
        )


def _of_dual_clip(config: Any) -> None:
    clips = config.proximal_policy == "behaviour" or config.updates_per_step > 1
    if config.dual_clip is not None and not clips:
        raise ValueError(
            f"dual_clip: {config.dual_clip} has no effect with proximal_policy: current and one "
            "update per step, where nothing has moved that could be clipped; leave it out"
        )


def _is_set(config: Any, name: str) -> bool:
    """Whether a setting differs from its default."""
    return bool(getattr(config, name) != type(config).model_fields[name].default)
