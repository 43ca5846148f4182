"""Settings of a correction that would have no effect are refused. Light: imports no torch."""

from __future__ import annotations


def truncates(correction: str) -> bool:
    """Whether it truncates weights to `importance_cap`."""
    return correction.endswith(("truncated", "rejected"))


def refuse_what_has_no_effect(
    algorithm: str,
    correction: str,
    *,
    ratio_in_loss: bool,
    clips: bool,
    importance_cap: float | None,
    dual_clip: float | None,
    has_band: bool,
) -> None:
    """Refuse settings next to a correction that change nothing.

    Args:
        algorithm: its name.
        correction: its name.
        ratio_in_loss: `proximal_policy: behaviour`.
        clips: whether the loss may clip a ratio.
        importance_cap: if it is not the default.
        dual_clip: if it was given.
        has_band: whether `correction_band` was given.

    Raises:
        ValueError: one has no effect; the text says which, and what to do.
    """
    if ratio_in_loss and correction == "sequence_truncated":
        raise ValueError(
            "correction: sequence_truncated is a weight, but with proximal_policy: behaviour "
            f"the loss of {algorithm} holds the ratio already; choose sequence_masked, "
            "sequence_rejected, token_masked or none"
        )
    if importance_cap is not None and ratio_in_loss:
        raise ValueError(
            f"importance_cap: {importance_cap} has no effect with proximal_policy: behaviour, "
            "whose loss holds the ratio; leave it out. PPO's dual clip is dual_clip"
        )
    if importance_cap is not None and not truncates(correction):
        raise ValueError(
            f"importance_cap: {importance_cap} has no effect with correction: {correction}, which "
            "truncates nothing; leave it out"
        )
    if dual_clip is not None and not clips:
        raise ValueError(
            f"dual_clip: {dual_clip} has no effect with proximal_policy: current and one update a "
            "step, where nothing is clipped; leave it out"
        )
    if has_band and not correction.endswith(("masked", "rejected")):
        raise ValueError(
            f"correction_band has no effect with correction: {correction}; it is for token_masked, "
            "sequence_masked and sequence_rejected"
        )
