"""What the live view shows at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunView:
    """A snapshot of a run; None where a number is not known (yet)."""

    phase: str = "starting"
    """What the run does as a whole: "starting", "evaluating 120/256", "training", "stopping"."""
    step: int = 0
    """Optimizer steps done."""
    reward_mean: float | None = None
    """Mean reward of the last step's samples."""
    recent_rewards: tuple[float, ...] = ()
    """The same of the steps before, oldest first, the last one included."""
    tokens_per_second: float | None = None
    """Response tokens of all generators."""
    staleness_mean: float | None = None
    """In steps, over the last step's tokens."""
    staleness_max: float | None = None
    """The largest of these."""
    draft_acceptance: float | None = None
    """Accepted share of the proposed tokens, 0 to 1."""
    drafted_share: float | None = None
    """Share of the response tokens that came from accepted drafts, 0 to 1."""
    samples_running: int | None = None
    """Samples that generators write."""
    samples_held: int | None = None
    """Finished samples that generators hold."""
    samples_queued: int | None = None
    """Samples that the trainer has and has not trained on."""
    generator_idle: float | None = None
    """Share of the last step's time, 0 to 1, mean over generators."""
    trainer_idle: float | None = None
    """Share of the last step's time, 0 to 1."""
    eta_seconds: float | None = None
    """Estimated time to the end of the run."""
    accuracy_before: float | None = None
    """Held-out accuracy before the first step, 0 to 1."""
    waiting_for: str | None = None
    """What the run cannot go on without, if it stands."""
