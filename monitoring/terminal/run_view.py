"""What the live view shows at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncrl.monitoring.terminal.evaluation_text import incomplete
from asyncrl.wire.records.evaluations import EvaluationRecord, accuracy_of
from asyncrl.wire.records.reward_counts import RewardCounts
from asyncrl.wire.records.step import GroupTotals, StepMetrics, TokenCounts


@dataclass(frozen=True, slots=True)
class RunView:
    """A snapshot of a run; None where a value is not known (yet)."""

    phase: str = "starting"
    """What the run is doing: "starting", "evaluating 120/256", "training", "stopping"."""
    step: int = 0
    """Optimizer steps finished."""
    last: StepMetrics | None = None
    """Record of the last finished step."""
    exactly_on_policy: bool | None = None
    """Whether all steps were, those before a resume included."""
    recent_rewards: tuple[float, ...] = ()
    """Mean reward of the last steps, oldest first."""
    tokens: TokenCounts = field(default_factory=TokenCounts)
    """Of all generators, since training began in this process."""
    groups: GroupTotals = field(default_factory=GroupTotals)
    """Groups settled by the run, those before a resume included."""
    groups_in_flight: int | None = None
    """Groups issued and not settled."""
    groups_delivered: int | None = None
    """Of these: whole in the trainer, so that no loss of a generator can take them away."""
    samples_running: int | None = None
    """Samples that generators are generating."""
    samples_in_environments: int | None = None
    """Of these: those whose environment has to answer before they need a slot."""
    samples_held: int | None = None
    """Finished samples that generators hold."""
    samples_queued: int | None = None
    """Samples that the trainer has received and not yet trained on."""
    eta_seconds: float | None = None
    """Estimated time to the end of the run."""
    accuracy_before: float | None = None
    """Held-out accuracy before the first step, 0 to 1."""
    evaluation: EvaluationRecord | None = None
    """The evaluation of the newest step that has one."""
    evaluating: str | None = None
    """What is being evaluated, and how far: "step 40, 120/256"."""
    best_step: int | None = None
    """The step with the best held-out accuracy (`evaluation.best_of`)."""
    best_accuracy: float | None = None
    """Its accuracy, 0 to 1."""
    waiting_for: str | None = None
    """What the run needs before it can continue, a clause; None while nothing holds it up."""

    @property
    def draft_acceptance(self) -> float | None:
        """Accepted share of the drafted tokens, 0 to 1."""
        return self.tokens.accepted / self.tokens.drafted if self.tokens.drafted else None

    @property
    def drafted_share(self) -> float | None:
        """Share of the generated tokens that came from accepted drafts, 0 to 1."""
        return self.tokens.accepted / self.tokens.generated if self.tokens.generated else None

    def as_status(self) -> dict[str, Any]:
        """The values as `asyncrl status` shows them, by name."""
        last = self.last
        sets = {} if self.evaluation is None else self.evaluation.sets
        return {
            "phase": self.phase,
            "step": self.step,
            "reward_mean": None if last is None else last.learning.reward_mean,
            "tokens_per_second": None if last is None else last.tokens_per_second,
            "staleness_mean": None if last is None else last.staleness.mean,
            "staleness_max": None if last is None else last.staleness.max,
            "exactly_on_policy": self.exactly_on_policy,
            "draft_acceptance": self.draft_acceptance,
            "drafted_share": self.drafted_share,
            "groups_trained": self.groups.trained,
            "groups_failed": self.groups.failed,
            "groups_without_signal": self.groups.without_signal or None,
            "groups_in_flight": self.groups_in_flight,
            "groups_delivered": self.groups_delivered,
            "samples_running": self.samples_running,
            "samples_in_environments": self.samples_in_environments,
            "samples_held": self.samples_held,
            "samples_queued": self.samples_queued,
            "environment_turns": None if last is None else last.environments.turns or None,
            "environment_seconds": None if last is None else last.environments.mean_seconds,
            "started_over": None if last is None else last.environments.started_over or None,
            "rewards_failed": None if last is None else _failed(last).failures or None,
            "reward_failures": {} if last is None else last.reward_failures,
            "generator_idle": None if last is None else last.idle.generator,
            "trainer_idle": None if last is None else last.idle.trainer,
            "eta_seconds": self.eta_seconds,
            "accuracy_before": self.accuracy_before,
            "accuracy": accuracy_of(self.evaluation),
            "accuracy_step": None if self.evaluation is None else self.evaluation.step,
            "accuracies": {name: one.accuracy for name, one in sets.items()},
            "evaluation_incomplete": incomplete(self.evaluation),
            "evaluating": self.evaluating,
            "best_step": self.best_step,
            "best_accuracy": self.best_accuracy,
            "waiting_for": self.waiting_for,
        }


def _failed(step: StepMetrics) -> RewardCounts:
    """Rewards and environments that failed and counted as 0."""
    return RewardCounts(failed=step.reward_failures)
