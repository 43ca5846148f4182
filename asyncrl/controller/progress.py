"""The progress of a run: for the live view, metrics.jsonl, Prometheus and `asyncrl status`."""

import time
from collections import Counter, deque

import msgspec

from asyncrl.config.run_config import RunConfig
from asyncrl.controller import warnings
from asyncrl.controller.policy_mismatches import Findings
from asyncrl.controller.statistics import (
    GenerationTotals,
    RewardTotals,
    RunGroups,
    StepTotals,
    in_flight,
    too_few_groups,
)
from asyncrl.evaluation.results import EvaluationResults
from asyncrl.evaluation.round import Accuracy, EvaluationRound
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.monitoring.metrics.controller_metrics import GENERATOR_STATES
from asyncrl.monitoring.metrics.metrics import ControllerMetrics
from asyncrl.monitoring.records.metrics_log import MetricsLog
from asyncrl.monitoring.terminal.evaluation_text import evaluation_lines
from asyncrl.monitoring.terminal.formatting import counted, duration
from asyncrl.monitoring.terminal.live import LiveView
from asyncrl.monitoring.terminal.run_view import PAUSED, RunView
from asyncrl.scheduler.scheduler import Scheduler
from asyncrl.scheduler.view import SchedulerView
from asyncrl.wire.messages.from_trainer import StepFinished
from asyncrl.wire.records.evaluations import EvaluationRecord, accuracy_of
from asyncrl.wire.records.noise_floor import NoiseFloor
from asyncrl.wire.records.reward_counts import RewardCounts, RewardWait
from asyncrl.wire.records.step import (
    EnvironmentCounts,
    IdleShares,
    OnPolicySteps,
    RunAheadChoice,
    RunResult,
    StepMetrics,
    TokenCounts,
)
from asyncrl.wire.records.wrong_policy import WrongPolicy


class Progress:
    """Follows a run, in the controller's event loop; `earlier` are the steps before a resume."""

    def __init__(
        self,
        config: RunConfig,
        *,
        view: LiveView,
        log: MetricsLog,
        metrics: ControllerMetrics,
        earlier: list[StepMetrics],
    ) -> None:
        self._config = config
        self._view = view
        self._log = log
        self._metrics = metrics
        self._tokens_before = earlier[-1].tokens if earlier else TokenCounts()
        self._noise_before = earlier[-1].noise_floor if earlier else NoiseFloor()
        self._noise_floor = self._noise_before
        self._environment_before = earlier[-1].environments if earlier else EnvironmentCounts()
        self._environment = self._environment_before
        self._in_environments = 0
        self._reward_wait = RewardWait()
        self._unrewarded_seconds, self._looked_at = 0.0, 0.0
        self._groups = RunGroups(earlier, config.scheduler.groups_per_step)
        self._seconds_before = earlier[-1].wall_seconds if earlier else 0.0
        self._rewards = deque((one.learning.reward_mean for one in earlier), maxlen=200)
        self._steps = StepTotals(earlier)
        self._scheduler: Scheduler | None = None
        known = earlier[-1].run_ahead if earlier else RunAheadChoice()
        self.run_ahead_before = known.steps if known.why else -1
        """Depth that was chosen before a resume, in steps; -1: none was."""
        self.run_ahead = RunAheadChoice()
        self._phase = "starting"
        self.evaluations: EvaluationResults | None = None
        self._fleet: Fleet | None = None
        self._evaluation: EvaluationRound | None = None
        now = time.monotonic()
        self._totals = GenerationTotals(now)
        self._last_step_at = now
        self._last_step: StepMetrics | None = None
        self._trained_seconds = 0.0
        self._trained_tokens = TokenCounts()
        self._recent_tokens = TokenCounts()
        self._steps_here = 0
        self._step = len(earlier)
        self.stopping = False
        self._warned: set[str] = set()
        self._findings = Findings(earlier, self.say, metrics)
        before = RewardCounts(failed=earlier[-1].reward_failures if earlier else {})
        self._reward_totals = RewardTotals(config, self.say, before)
        for warning in warnings.at_start(config):
            self.say(warning)

    def say(self, text: str) -> None:
        """Print a message."""
        self._view.log(text)

    def _warn_once(self, kind: str, text: str | None) -> None:
        if text is not None and kind not in self._warned:
            self._warned.add(kind)
            self.say(text)

    def decided(self, event: str, seconds: float) -> None:
        """Count an event that the scheduler handled."""
        self._metrics.events.of(event).inc()
        self._metrics.event_time.inc(seconds)

    def died(self, role: str, name: str) -> None:
        """Count a process that ended unexpectedly."""
        self._findings.died(name)
        self._metrics.process_failures.of(role).inc()

    def evaluated(
        self, record: EvaluationRecord, *, is_best: bool = False, is_known: bool = False
    ) -> None:
        """Record a complete evaluation; `is_known`: it was measured before a resume."""
        if record.when == "before":
            self._phase = "training begins"
        self._metrics.evaluated(record)
        for line in evaluation_lines(record, is_best=is_best, is_known=is_known):
            self._view.log(line)

    def evaluation_given_up(self) -> None:
        """Count an evaluation during training without a result."""
        self._metrics.evaluations.of("given_up").inc()

    def training_begins(self, scheduler: Scheduler, first_step: int) -> None:
        """Start the clock and the counters of the training phase."""
        self._scheduler = scheduler
        self._phase = "training"
        self._step = first_step
        self._metrics.run.of(self._config.run.name).set(1)
        self._metrics.started.set(time.time())  # noqa: TID251 - for people
        self._metrics.steps_planned.set(self._config.run.steps)
        self._metrics.count_on_policy(self._on_policy)
        self._last_step_at = time.monotonic()
        self._count()
        self._totals.begin(self._last_step_at)

    def training_ends(self) -> None:
        """Freeze the totals: what follows is evaluation."""
        self._trained_seconds = time.monotonic() - self._totals.began
        self._count()
        self._trained_tokens = self._totals.tokens
        self._reward_totals.summarize()
        if said := warnings.little_signal(self._steps.signal(), self._step):
            self.say(said)
        self._phase = "training is over"

    def step_finished(self, message: StepFinished) -> None:
        """Record an optimizer step: in metrics.jsonl, in Prometheus and for the live view."""
        now = time.monotonic()
        self._count()
        step = self._record(message, now)
        self._step, self._steps_here = message.step + 1, self._steps_here + 1
        self._last_step_at, self._last_step = now, step
        self._unrewarded_seconds = 0.0
        self._warn_once("noise floor", warnings.noise_floor(self._config, step.noise_floor))
        self._warn_once("top-K", warnings.small_top_k(self._config, step.tokens))
        self._warn_once("no signal", warnings.no_signal(self._config, step))
        self._warn_once("cut", warnings.mostly_cut(self._config, step))
        if said := too_few_groups(step, self._config.scheduler):
            self.say(said)
        self._view.samples(message.shown, self._config.reward_labels, message.step)
        self._log.append(step)
        self._rewards.append(step.learning.reward_mean)
        self._steps.add(step)
        self._metrics.publish(step)
        self._metrics.count_on_policy(self._on_policy)
        self._metrics.steps.inc()
        self._metrics.samples_ended.of("trained").inc(
            len(message.groups) * self._config.scheduler.group_size
        )
        self._metrics.step_time.observe(step.step_seconds)
        self._metrics.policy_version.set(message.manifest.policy_version)
        if self._fleet is not None:  # two steps may finish between two calls of `show`
            self._view.update(self._run_view(self._fleet, self._evaluation, self._snapshot()))

    def group_failed(self, group: int, reason: str) -> None:
        """Report that a group is left out of its step."""
        self._groups.failed(group)
        self.say(f"group {group} is not trained on: {reason}")

    def group_without_signal(self, group: int, reward: float) -> None:
        """Count a group left out because all of its rewards are equal."""
        self._groups.without_signal(group)
        self._metrics.groups_without_signal.of("equal" if reward else "zero").inc()

    def first_groups(self, step: int) -> dict[int, int]:
        """First group of each step up to this one, with dynamic sampling."""
        return self._groups.first_groups(step)

    def found(self, wrong: WrongPolicy) -> None:
        """Record that a process samples from another policy than the one being trained."""
        self._findings.add(wrong)

    def installed(self, generator: str, version: int) -> None:
        """Note that a generator decodes with the weights of this version."""
        self._findings.installed(generator, version)

    def has_waiting_records(self) -> bool:
        """Return True if buffered lines of metrics.jsonl still cannot be written."""
        return not self._log.flush()

    def rewound(self, earlier: list[StepMetrics] | None, step: int) -> None:
        """Return to this step, the next one; `earlier` are its records, None if they are lost."""
        if earlier is None:
            for _ in range(min(self._step - step, len(self._rewards))):
                self._rewards.pop()
        else:
            self._rewards = deque((one.learning.reward_mean for one in earlier), maxlen=200)
        self._steps.rewind(step)
        self._groups.rewind(earlier)
        self._findings.rewind(earlier)
        if self._log.flush():  # the file may have been replaced
            self._log.close()
            self._log = MetricsLog(self._log.path)
        self._step = step
        self._metrics.policy_version.set(step)
        self._metrics.count_on_policy(self._on_policy)

    @property
    def _on_policy(self) -> OnPolicySteps:
        return self._steps.on_policy(self._step)

    def _record(self, message: StepFinished, now: float) -> StepMetrics:
        seconds = max(1e-9, now - self._last_step_at)
        times = message.times.within(seconds)
        recent = self._totals.recent(now, times.wait_seconds, self._unrewarded_seconds)
        self._recent_tokens = recent.tokens
        wrong, learned = self._findings.of_step(), msgspec.structs.asdict(message.metrics)
        if wrong or self._findings.last:
            learned["exactly_on_policy"] = False
        generators = max(1, len(self._fleet.generators()) if self._fleet is not None else 1)
        ledger = None if self._scheduler is None else self._scheduler.state.ledger
        end = None if ledger is None else ledger.end_of(message.step)
        return StepMetrics(
            step=message.step,
            time=time.time(),  # noqa: TID251 - for the record of the step
            groups=self._groups.of_step(message.step, message.groups, end),
            wall_seconds=self._seconds_before + now - self._totals.began,
            step_seconds=seconds,
            tokens_per_second=recent.tokens.generated / recent.seconds,
            engine_busy_seconds=self._totals.busy_seconds,
            tokens=self._tokens_before + self._totals.tokens,
            noise_floor=self._noise_floor,
            environments=self._environment,
            idle=IdleShares(
                generator=min(1.0, max(0.0, 1 - recent.busy_share / generators)),
                trainer=min(1.0, recent.wait_share),
                for_rewards=min(1.0, recent.reward_share),
            ),
            times=times,
            rewards=self._reward_totals.named(message.reward_terms),
            reward_failures=self._reward_totals.counts.failed,
            run_ahead=self.run_ahead,
            wrong_policy=wrong,
            **learned,
        )

    def _count(self) -> None:
        if self._fleet is not None:
            workers = self._fleet.every_generator
            reports = [one.report for one in workers if one.report is not None]
            self._totals.update(report.engine for report in reports)
            self._reward_totals.update(report.rewards for report in reports)
            noise = [report.noise_floor for report in reports]
            self._noise_floor = sum(noise, start=self._noise_before)
            text = warnings.kept_by_verification(self._config, self._noise_floor)
            self._warn_once("kept", text)
            counts = [report.environment for report in reports]
            self._environment = sum(counts, start=self._environment_before)
            here = [one.report for one in self._fleet.generators() if one.report is not None]
            self._in_environments = sum(one.in_environments for one in here)
            self._reward_wait = sum((one.reward_wait for one in here), start=RewardWait())

    def show(self, fleet: Fleet, evaluation: EvaluationRound | None) -> None:
        """Refresh the live view."""
        self._fleet, self._evaluation = fleet, evaluation
        self._count()
        snapshot, now = self._snapshot(), time.monotonic()
        if snapshot is not None and snapshot.unrewarded:
            self._unrewarded_seconds += now - max(self._looked_at, self._last_step_at)
        self._looked_at = now
        view = self._run_view(fleet, evaluation, snapshot)
        self._view.update(view)
        metrics = self._metrics
        if snapshot is not None:
            failed = snapshot.groups_failed * self._config.scheduler.group_size
            metrics.samples_ended.of("failed").follow(failed)
            metrics.groups_left_over.follow(snapshot.groups_left_over)
            if snapshot.signal_share is not None:
                metrics.signal_share.set(snapshot.signal_share)
        metrics.eta.set(view.eta_seconds or 0.0)
        metrics.samples.of("running").set(view.samples_running or 0)
        metrics.samples.of("held").set(view.samples_held or 0)
        metrics.samples.of("queued").set(view.samples_queued or 0)
        states = Counter(worker.state for worker in fleet.every_generator)
        for state in GENERATOR_STATES:
            metrics.generators.of(state).set(states[state])

    def _phase_text(self, fleet: Fleet, evaluation: EvaluationRound | None) -> str:
        if evaluation is not None and evaluation.version is None:
            return f"evaluating {evaluation.finished}/{evaluation.total}"
        if self.stopping:
            return "stopping"
        return self._phase if fleet.all_ready or self._scheduler is not None else "starting"

    def _snapshot(self) -> SchedulerView | None:
        if self._scheduler is None:
            return None
        wait = self._reward_wait
        about = f" ({wait.function}, {duration(wait.seconds)})" if wait.function else ""
        return self._scheduler.snapshot(wait.samples if wait.step == self._step else 0, about)

    def unrewarded(self) -> tuple[int, str]:
        """Samples without a reward if the current step lacks nothing else, and the reason."""
        snapshot = self._snapshot()
        number = 0 if snapshot is None else snapshot.unrewarded
        wait = self._reward_wait
        about = f"; {wait.function} has run for {duration(wait.seconds)}" if wait.function else ""
        return number, f"the rewards of {counted(number, 'sample')} did not come{about}"

    def _run_view(
        self, fleet: Fleet, evaluation: EvaluationRound | None, snapshot: SchedulerView | None
    ) -> RunView:
        results = self.evaluations
        best = None if results is None else results.best
        left = self._config.run.steps - self._step
        elapsed = time.monotonic() - self._totals.began
        paused = snapshot is not None and snapshot.paused
        reports = [one.report for one in fleet.ranks]
        queued = [one.queued_trajectories for one in reports if one is not None]
        waiting_for = snapshot.waits[0] if snapshot is not None and snapshot.waits else None
        if snapshot is None and not fleet.all_ready:
            waiting_for = f"the run waits for {fleet.unready()} to become ready"
        return RunView(
            phase=PAUSED if paused else self._phase_text(fleet, evaluation),
            step=self._step,
            last=self._last_step,
            exactly_on_policy=self._on_policy.exactly,
            recent_rewards=tuple(self._rewards),
            tokens=self._recent_tokens,
            groups=self._groups.settled(snapshot),
            groups_in_flight=None if snapshot is None else in_flight(snapshot),
            groups_delivered=None if snapshot is None else snapshot.groups_waiting,
            samples_running=None if snapshot is None else snapshot.samples_running,
            samples_in_environments=None if snapshot is None else self._in_environments,
            samples_held=None if snapshot is None else snapshot.samples_held,
            samples_queued=sum(queued) if queued else None,
            eta_seconds=elapsed / self._steps_here * left
            if self._steps_here and not paused
            else None,
            accuracy_before=accuracy_of(None if results is None else results.before),
            evaluation=None if results is None else results.newest,
            evaluating=None if evaluation is None else evaluation.describe(),
            best_step=None if best is None else best.step,
            best_accuracy=None if results is None or best is None else results.value_of(best),
            waiting_for=waiting_for,
        )

    def view(self, fleet: Fleet, evaluation: EvaluationRound | None) -> RunView:
        """Return the current view of the run."""
        self._count()
        return self._run_view(fleet, evaluation, self._snapshot())

    def result(
        self, before: Accuracy | None, after: Accuracy | None, *, total_seconds: float
    ) -> RunResult:
        """Return the run's result, with its held-out accuracy before and after training."""
        results = self.evaluations
        best = None if results is None else results.best
        samples = [one.samples for one in (before, after) if one and one.value is not None]
        # Findings may follow the last step.
        is_wrong = bool(self._findings.all) and self._config.run.on_wrong_policy == "warn"
        return RunResult(
            run=self._config.run.name,
            engine=self._config.engine_kinds,
            steps=self._step,
            wall_seconds=self._seconds_before + self._trained_seconds,
            total_seconds=total_seconds,
            tokens=self._tokens_before + self._trained_tokens,
            groups=self._groups.settled(self._snapshot()),
            signal=self._steps.signal(),
            staleness=self._steps.staleness(),
            exactly_on_policy=False if is_wrong else self._on_policy.exactly,
            accuracy_before=None if before is None else before.value,
            accuracy_after=None if after is None else after.value,
            reward_before=None if before is None else before.reward,
            reward_after=None if after is None else after.reward,
            best_step=None if best is None else best.step,
            best_accuracy=None if results is None or best is None else results.value_of(best),
            evaluation_samples=samples[0] if samples else 0,
            reward_failures=self._reward_totals.counts.failed,
            wrong_policy=self._findings.all,
        )
