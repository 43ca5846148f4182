"""A snapshot of a run for the live view."""

from dataclasses import dataclass, field
from typing import Any

from asyncrl.monitoring.terminal.evaluation_text import incomplete
from asyncrl.wire.records.evaluations import EvaluationRecord, accuracy_of, graded_reward_of
from asyncrl.wire.records.reward_counts import RewardCounts
from asyncrl.wire.records.step import GroupTotals, StepMetrics, TokenCounts

PAUSED = "paused"
"""The phase of a paused run."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A snapshot of a run; None where a value is not known (yet)."""

    phase: str = "starting"
    """"starting", "evaluating 120/256", "training", "paused" or "stopping"."""
    step: int = 0
    """Optimizer steps finished."""
    last: StepMetrics | None = None
    exactly_on_policy: bool | None = None
    """True if all steps were, including those before a resume."""
    recent_rewards: tuple[float, ...] = ()
    """Mean reward of the last steps, oldest first."""
    tokens: TokenCounts = field(default_factory=TokenCounts)
    """Counts of all generators in the last seconds, as those of `last.tokens_per_second`; of an
    ended run, since it began."""
    groups: GroupTotals = field(default_factory=GroupTotals)
    """Groups settled by the run, including those before a resume."""
    groups_in_flight: int | None = None
    """Groups issued and not settled."""
    groups_delivered: int | None = None
    """Groups in flight that are whole in the trainer, so that losing a generator cannot lose
    them."""
    samples_running: int | None = None
    samples_in_environments: int | None = None
    """Running samples that wait for their environment before they need a slot."""
    samples_held: int | None = None
    samples_queued: int | None = None
    """Samples that the trainer has received and not trained on yet."""
    eta_seconds: float | None = None
    accuracy_before: float | None = None
    """Held-out accuracy before the first step, 0 to 1."""
    evaluation: EvaluationRecord | None = None
    evaluating: str | None = None
    """The running evaluation and its progress: "step 40, 120/256"."""
    best_step: int | None = None
    """The step with the best held-out accuracy (`evaluation.best_of`)."""
    best_accuracy: float | None = None
    waiting_for: str | None = None
    """The need that blocks the run, as a clause; None if it can continue."""

    @property
    def is_paused(self) -> bool:
        """True if nothing is generated, so that no speed and no time left is known."""
        return self.phase == PAUSED

    @property
    def draft_acceptance(self) -> float | None:
        """Accepted share of the drafted tokens, 0 to 1."""
        return self.tokens.accepted / self.tokens.drafted if self.tokens.drafted else None

    @property
    def drafted_share(self) -> float | None:
        """Share of the generated tokens that came from accepted drafts, 0 to 1."""
        return self.tokens.accepted / self.tokens.generated if self.tokens.generated else None

    def as_status(self) -> dict[str, Any]:
        """The values by their names in `asyncrl status`."""
        last = self.last
        speeds = None if self.is_paused else last
        batch = None if last is None or not last.batch.samples else last.batch
        failed = RewardCounts(failed={} if last is None else last.reward_failures)
        sets = {} if self.evaluation is None else self.evaluation.sets
        return {
            "phase": self.phase,
            "step": self.step,
            "reward_mean": None if last is None else last.learning.reward_mean,
            "response_length": None if batch is None else batch.response_length_mean,
            "truncated_share": None if batch is None else batch.truncated_share,
            "signalless_share": None if last is None else last.signalless_share,
            "tokens_per_second": None if speeds is None else speeds.tokens_per_second,
            "staleness_mean": None if last is None else last.staleness.mean,
            "staleness_max": None if last is None else last.staleness.max,
            "exactly_on_policy": self.exactly_on_policy,
            "run_ahead": None if last is None else str(last.run_ahead) or None,
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
            "rewards_failed": failed.failures or None,
            "reward_failures": {} if last is None else last.reward_failures,
            "generator_idle": None if speeds is None else speeds.idle.generator,
            "trainer_idle": None if speeds is None else speeds.idle.trainer,
            "waiting_for_rewards": None
            if speeds is None
            else round(speeds.idle.for_rewards, 2) or None,
            "eta_seconds": self.eta_seconds,
            "accuracy_before": self.accuracy_before,
            "accuracy": accuracy_of(self.evaluation),
            "held_out_reward": graded_reward_of(self.evaluation),
            "accuracy_step": None if self.evaluation is None else self.evaluation.step,
            "accuracies": {name: one.accuracy for name, one in sets.items()},
            "evaluation_incomplete": incomplete(self.evaluation),
            "evaluating": self.evaluating,
            "best_step": self.best_step,
            "best_accuracy": self.best_accuracy,
            "waiting_for": self.waiting_for,
        }
