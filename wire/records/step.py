"""The numbers that leave one process and reach a user: one typed record each.

    engine ── EngineStats ─► generator ── GeneratorReport ─┐
    learner ── LearnerMetrics ─► trainer ── StepFinished ──┴─► controller ── StepMetrics ─► users

An engine fills `EngineStats`, its generator adds its own counts, and the controller adds up the
reports of all generators. `StepMetrics` is the record of one optimizer step: a line of
metrics.jsonl, and the source of Prometheus metrics, the live view and the report.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, Self

import msgspec

from asyncrl.wire.records.noise_floor import NoiseFloor
from asyncrl.wire.transport.decoding import Amount, Count

Measured = float | None
"""A measurement; None if there was nothing to measure or the result was not finite."""


class Counts(msgspec.Struct, frozen=True):
    """Counts that add and subtract as a whole."""

    def __add__(self, other: Self) -> Self:
        return type(self)(
            **{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        )

    def __sub__(self, other: Self) -> Self:
        return type(self)(
            **{name: getattr(self, name) - getattr(other, name) for name in self.__struct_fields__}
        )


class TokenCounts(Counts, frozen=True, kw_only=True, gc=False):
    """Counts of response tokens by their fate."""

    generated: int = 0
    """Drawn by an engine, with accepted drafts, without tokens that verification accepted."""
    drafted: int = 0
    """Proposed to the engine by the cache."""
    accepted: int = 0
    """Drafted tokens that the engine accepted."""
    verified: int = 0
    """Tokens of an older policy version that verification accepted."""
    rejected: int = 0
    """Tokens of an older policy version that verification rejected; they are regenerated."""
    outside_top_k: int = 0
    """Tokens that are not among the top K stored with them, verified ones included."""


class EnvironmentCounts(Counts, frozen=True, kw_only=True):
    """Counts of generators' environments."""

    turns: Count = 0
    """Answered turns, replayed ones included."""
    seconds: Amount = 0.0
    """Time until they were answered, summed over all samples."""
    replayed: Count = 0
    """Environments that were made again and replayed the accepted turns, because verification had
    changed a later turn or their process had ended."""
    restored: Count = 0
    """Environments that went back to before a turn by `restore`."""
    started_over: Count = 0
    """Samples that began again because their environment cannot go back."""
    lost: Count = 0
    """Samples that started over because their worker process had ended."""
    hanging: Count = 0
    """Hanging threads of environments and agents that were left behind."""
    replaced_workers: Count = 0
    """Worker processes that ended, or were ended, and were replaced."""

    calls: Count = 0
    wrong_calls: Count = 0
    """Tool calls that could not be read, named no tool or had wrong arguments."""

    @property
    def mean_seconds(self) -> float | None:
        """Mean time until a turn is answered; None without turns."""
        return self.seconds / self.turns if self.turns else None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's counters since its start, and its gauges as of now."""

    tokens: TokenCounts = TokenCounts()
    """The engine counts `generated`, `drafted` and `accepted`; the generator adds the rest."""
    steps: Count = 0
    """Forward passes of the decoding loop."""
    busy_seconds: Amount = 0.0
    running: Count = 0
    """Requests that hold a slot."""
    waiting: Count = 0
    """Requests that wait for a slot."""
    slots: Count = 0
    """Requests that can run at once."""
    kv_used: Amount = 0.0
    """Share of the KV space in use, 0 to 1."""
    policy_version: int = 0
    """Version of the weights that the engine samples from."""


class LearningMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards of the samples trained on, and the update made from them."""

    reward_mean: float = 0.0
    reward_std: float = 0.0
    loss: float = 0.0
    """Loss before the optimizer's step, penalties included."""
    grad_norm: float = 0.0
    """Global norm of the gradient before clipping."""
    learning_rate: float = 0.0
    entropy: Measured = None
    """Mean entropy of the policy per token, in nats."""
    optimizer_steps: int = 1
    """Updates of the weights (`trainer.ppo_epochs` times `trainer.minibatches`). The step's samples
    are on-policy for the first one only."""


class BatchMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the step."""

    groups: int = 0
    zero_variance_groups: int = 0
    """Groups whose advantages are all 0."""
    samples: int = 0
    tokens: int = 0
    """Response tokens of all samples, without observed ones, here and below."""
    tokens_observed: int = 0
    """Tokens of environments in their responses, which are not trained on."""
    tokens_computed: int = 0
    """Response tokens that went through the model; skipped groups are left out."""
    response_length_mean: float = 0.0
    response_lengths: dict[int, int] = {}
    """Number of samples by response length in tokens, ascending. Lengths of 256 and more are
    rounded down to 8 significant bits, so the number of entries is bounded."""
    truncated_share: float = 0.0
    """Share of samples cut off by the token limit or a deadline, 0 to 1."""


class StalenessMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Optimizer steps from the policy that a token follows to the policy trained on it."""

    mean: float = 0.0
    """Mean over the step's response tokens."""
    max: int = 0


class MismatchMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's log-probabilities against the recorded behaviour log-probabilities.

    The `fresh_*` fields are over tokens of staleness 0, where the difference is numerical (or the
    engine reads KV that older weights computed). All others also measure how far the policy has
    moved since the tokens were drawn. None: no such token was computed.
    """

    abs_mean: Measured = None
    """Mean absolute difference of the log-probabilities, in nats."""
    abs_max: Measured = None
    kl: Measured = None
    """KL(behaviour || current) per token, in nats, by the unbiased k3 estimator."""
    fresh_abs_mean: Measured = None
    """`abs_mean` over tokens of staleness 0: engine against trainer."""
    fresh_kl: Measured = None
    """`kl` over tokens of staleness 0."""
    ratio_mean: Measured = None
    """Mean importance ratio, current over behaviour probability."""
    ratio_max: Measured = None
    outside_nucleus: Measured = None
    """Share of tokens outside the trainer's top-p set, 0 to 1."""


class LearnerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The learner's measurements of one optimizer step; by default nothing was trained."""

    learning: LearningMetrics = LearningMetrics()
    batch: BatchMetrics = BatchMetrics()
    staleness: StalenessMetrics = StalenessMetrics()
    exactly_on_policy: bool | None = None
    """True if staleness was 0, without lenient reuse and without a sample deadline, no process was
    known to have another policy (`wrong_policy`), and there was one update of the weights
    (`learning.optimizer_steps`). None: recorded by an earlier version of asyncrl
    (`OnPolicySteps`)."""
    mismatch: MismatchMetrics = MismatchMetrics()
    algorithm: dict[str, Measured] = {}
    """The algorithm's signals (`asyncrl.trainer.algorithms.base.Signal`), by name."""


class TrainerTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's time of one step, in seconds."""

    train_seconds: float = 0.0
    """Forward, backward and optimizer."""
    publish_seconds: float = 0.0
    """Writing the new weights for the generators."""
    wait_seconds: float = 0.0
    """Waiting for groups or for the step's plan."""
    wait_first_seconds: float = 0.0
    """Part of `wait_seconds` until the step's first group was complete."""
    wait_last_seconds: float = 0.0
    """Part of `wait_seconds` for the step's last group, the one with the slowest sample."""
    rank_idle_seconds: float = 0.0
    """Mean wait of the trainer's ranks, at the end of the step, for those that still computed
    gradients; 0 with one rank."""

    def within(self, step_seconds: float) -> TrainerTimes:
        """Return the times with waits cut to a step's length: the first one begins too early."""
        worked = self.train_seconds + self.publish_seconds
        waited = min(self.wait_seconds, max(0.0, step_seconds - worked))
        last = min(self.wait_last_seconds, waited)
        first = min(self.wait_first_seconds, waited - last)
        return msgspec.structs.replace(
            self, wait_seconds=waited, wait_first_seconds=first, wait_last_seconds=last
        )


class TrainedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer's record of an optimizer step; a checkpoint holds those since the previous one."""

    step: int
    time: float
    groups: tuple[int, ...]
    metrics: LearnerMetrics
    times: TrainerTimes


class IdleShares(msgspec.Struct, frozen=True, kw_only=True):
    """Idle share of processes' time, 0 to 1."""

    generator: Measured = 0.0
    """Mean over generators in the time of `tokens_per_second`. None: lost with a killed
    controller."""
    trainer: float = 0.0
    """Mean of the same time, from the trainer's waits in its steps."""
    for_rewards: float = 0.0
    """Share of the same time in which its step lacked nothing but rewards."""


class StepGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one step, ascending; together they are all groups of the step.

    Step b has the groups `[b * groups_per_step, (b + 1) * groups_per_step)`; with
    `scheduler.dynamic_sampling`, those from the end of the previous step to its own last one.
    """

    trained: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    """Left out because a sample failed."""
    without_signal: tuple[int, ...] = ()
    """Left out because their rewards are all equal (`scheduler.dynamic_sampling`)."""

    @property
    def end(self) -> int:
        """The first group after the listed ones; 0 if there are none."""
        return max([*self.trained, *self.failed, *self.without_signal], default=-1) + 1


class RunAheadChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Depth of run-ahead in whole steps, and the reason; it is empty if the user decides."""

    steps: int = 0
    tried: int | None = None
    """Depth of a trial that is under way."""
    why: str = ""

    @property
    def depth(self) -> int | None:
        """The depth in force; None if the user decides."""
        if not self.why:
            return None
        return self.steps if self.tried is None else self.tried

    def __str__(self) -> str:
        if not self.why:
            return ""
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        trial = "" if self.tried is None else f", {self.tried} tried now"
        return f"{steps}{trial} ({self.why})"


class StepMetrics(LearnerMetrics, frozen=True):
    """One optimizer step, as the trainer and the controller know it: a line of metrics.jsonl."""

    step: int
    """Index of the step, from 0; `time` is the Unix time of its end, in seconds."""
    time: float
    groups: StepGroups = StepGroups()
    wall_seconds: float = 0.0
    """Training time so far in seconds, including that before a resume."""
    step_seconds: float = 0.0
    """Seconds since the previous step ended."""
    tokens_per_second: Measured = 0.0
    """Response tokens generated per second in this step and, if it was short, those before it up to
    three seconds, all generators together. None: lost with a killed controller."""
    engine_busy_seconds: Measured = 0.0
    """Time inside engine steps, all generators together, since this process began to train. None:
    lost with a killed controller."""
    tokens: TokenCounts = TokenCounts()
    """Counts of all generators since the run began, as are `noise_floor` and `environments`."""
    noise_floor: NoiseFloor = NoiseFloor()
    idle: IdleShares = IdleShares()
    times: TrainerTimes = TrainerTimes()
    rewards: dict[str, Measured] = {}
    """Mean value of each reward function for the samples trained on, without weights and without
    samples whose reward failed, by the function's label (`RewardConfig.labels`)."""
    reward_failures: dict[str, dict[str, int]] = {}
    """Reward calls that gave no reward, by function and reason, since the run began. Evaluation is
    included. Environments that failed count as the function `environment`."""
    environments: EnvironmentCounts = EnvironmentCounts()
    run_ahead: RunAheadChoice = RunAheadChoice()
    """The choice of `scheduler.max_runahead_groups: auto` when the step ended."""
    wrong_policy: tuple[str, ...] = ()
    """Findings since the previous step: generators that sample from another policy than the
    trainer's (`run.on_wrong_policy`). Later steps are not exactly on-policy either, until the
    policies agree again. Of many, the last sentence says how many more there were."""

    @property
    def signalless_share(self) -> Measured:
        """Share of the groups looked at that teach nothing, 0 to 1; None without any.

        Their samples have equal rewards, or advantages of 0 for another reason. Dynamic sampling
        leaves them out; otherwise they are trained on.
        """
        left_out = len(self.groups.without_signal)
        looked_at = self.batch.groups + left_out
        return (self.batch.zero_variance_groups + left_out) / looked_at if looked_at else None

    @property
    def learned_nothing(self) -> bool:
        """True if no reward reached the weights: no group had signal, or the gradient was 0.

        A critic may learn alone (`trainer.critic.head_start_steps`); the gradient is the policy's.
        """
        batch = self.batch
        still = self.learning.grad_norm == 0.0 and "value_loss" not in self.algorithm
        return batch.groups > 0 and (still or batch.zero_variance_groups == batch.groups)


class GroupTotals(Counts, frozen=True, kw_only=True):
    """Groups that a run has settled, including those before a resume."""

    trained: int = 0
    failed: int = 0
    without_signal: int = 0


class SignalTotals(Counts, frozen=True, kw_only=True):
    """Counts of what the steps of a run could learn from, including those before a resume."""

    steps_without: int = 0
    """Steps that learned nothing from their rewards (`StepMetrics.learned_nothing`)."""
    groups_without: int = 0
    """Groups trained on whose advantages are all 0; those that dynamic sampling left out are in
    `groups.without_signal`."""
    samples: int = 0
    """Samples trained on."""
    samples_cut: int = 0
    """Those of them that the token limit or a deadline cut off."""

    @classmethod
    def of(cls, step: StepMetrics) -> Self:
        """Return the totals of one step."""
        batch = step.batch
        return cls(
            steps_without=int(step.learned_nothing),
            groups_without=batch.zero_variance_groups,
            samples=batch.samples,
            samples_cut=round(batch.truncated_share * batch.samples),
        )


class OnPolicySteps(NamedTuple):
    """Numbers of steps that were exactly on-policy, were not, or are unknown."""

    yes: int = 0
    no: int = 0
    unknown: int = 0
    """Steps without a record, or with one of an earlier version of asyncrl."""

    @classmethod
    def of(cls, flags: Counter[bool | None], steps: int) -> Self:
        """Make the counts of a run of `steps` steps from its records' flags (`is_on_policy`)."""
        return cls(flags[True], flags[False], steps - flags[True] - flags[False])

    @property
    def exactly(self) -> bool | None:
        """True if all steps were. None: all known ones were, but some steps are unknown."""
        if self.no:
            return False
        return None if self.unknown else True


def is_on_policy(step: LearnerMetrics) -> bool | None:
    """Return True if a step trained on exactly on-policy samples; None if its record is silent."""
    return False if step.staleness.max else step.exactly_on_policy


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run: the contents of result.json."""

    run: str
    engine: str
    """Kind of the engine: "torch" or "vllm"."""
    steps: int
    """Optimizer steps done, including those before a resume."""
    wall_seconds: float
    """Training time in seconds, including that before a resume."""
    total_seconds: float
    """Time of this process in seconds, with the start of the other processes and evaluation."""
    tokens: TokenCounts
    """Counts of all generators in the training phase, including those before a resume."""
    groups: GroupTotals = GroupTotals()
    signal: SignalTotals = SignalTotals()
    staleness: StalenessMetrics
    exactly_on_policy: bool | None
    """True if every step was, including those before a resume. None: all known steps were, but some
    have no record or one of an earlier version of asyncrl."""
    accuracy_before: float | None = None
    """Held-out accuracy before training, 0 to 1, as after it; None if not measured."""
    accuracy_after: float | None = None
    evaluation_samples: int = 0
    """Held-out samples behind each accuracy."""
    reward_before: float | None = None
    """Held-out mean reward before training; None if not measured, or if it is the accuracy."""
    reward_after: float | None = None
    best_step: int | None = None
    """The step after 0 with the best held-out accuracy (`evaluation.best_of`); None: none."""
    best_accuracy: float | None = None
    reward_failures: dict[str, dict[str, int]] = {}
    wrong_policy: tuple[str, ...] = ()
    """The first findings of the run, as in `StepMetrics`; one of them may have ended it."""
