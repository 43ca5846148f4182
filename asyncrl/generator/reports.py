"""What a generator reports: `GeneratorReport` for the controller, metrics, the engine's log."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from asyncrl.engine.protocol import Engine
from asyncrl.generator.activity import Activity
from asyncrl.generator.engine_log import EngineLog
from asyncrl.generator.sample_recorder import SampleRecorder
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.generator.sample_traces import SampleTraces
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics
from asyncrl.rollout.trajectory import Trajectory
from asyncrl.wire.messages.from_generator import GeneratorReport


@dataclass(frozen=True, slots=True)
class GeneratorRecords:
    """Where a generator records what it does."""

    metrics: GeneratorMetrics
    activity: Activity
    """Its time line and the use of its slots."""
    engine_log: EngineLog | None = None
    """A line for each report; None: not recorded."""
    samples: SampleRecorder | None = None
    """A few whole samples for people to read; None: not recorded."""
    traces: SampleTraces | None = None
    """Spans of traced groups; None: nothing is traced."""


class GeneratorReports:
    """Collects the counters of one generator.

    Args:
        name: of the generator.
        engine: its engine.
        generator: counts verified tokens; its rewards and its noise floor are reported too.
        metrics: follow the counters.
        log: gets a line for each report; None: no log.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        generator: SampleGenerator,
        metrics: GeneratorMetrics,
        log: EngineLog | None,
    ) -> None:
        self._name = name
        self._engine = engine
        self._generator = generator
        self._metrics = metrics
        self._log = log

    def count_finished(self, trajectory: Trajectory) -> None:
        """Count a finished sample and its length, without observed tokens."""
        length = trajectory.trained_count
        self._metrics.samples_finished.of(trajectory.finish_reason).inc()
        self._metrics.response_length.observe(length)
        if self._log is not None:
            self._log.add_length(length)

    def report(
        self, *, held: int, unacknowledged: int, due_wait: float = 0.0, in_environments: int = 0
    ) -> GeneratorReport:
        """Update the metrics, log the counters and return them for the controller.

        Args:
            held: finished samples that were not delivered.
            unacknowledged: samples that were delivered and not acknowledged yet.
            due_wait: longest wait of a due sample for a slot, seconds.
            in_environments: samples that wait for their environment.
        """
        self._metrics.due_wait.set(due_wait)
        self._metrics.environment_waiting.set(in_environments)
        stats = self._engine.stats()
        report = GeneratorReport(
            self._name,
            engine=msgspec.structs.replace(stats, tokens=stats.tokens + self._generator.tokens),
            held=held,
            rewards_waiting=self._generator.rewards.pending,
            rewards=self._generator.rewards.counts,
            noise_floor=self._generator.noise_floor.measured,
            environment=self._generator.environment,
            in_environments=in_environments,
        )
        self._measure(report, samples_held=held + unacknowledged)
        if self._log is not None:
            self._log.append(report)
        return report

    def _measure(self, report: GeneratorReport, *, samples_held: int) -> None:
        metrics, engine = self._metrics, report.engine
        metrics.generated_tokens.follow(engine.tokens.generated)
        metrics.drafted_tokens.follow(engine.tokens.drafted)
        metrics.accepted_tokens.follow(engine.tokens.accepted)
        metrics.verified_tokens.follow(engine.tokens.verified)
        metrics.rejected_tokens.follow(engine.tokens.rejected)
        metrics.outside_top_k_tokens.follow(engine.tokens.outside_top_k)
        metrics.noise_floor_judged.follow(report.noise_floor.judged)
        metrics.noise_floor_rejected.follow(report.noise_floor.rejected)
        if report.noise_floor.abs_mean is not None:
            metrics.noise_floor_difference.set(report.noise_floor.abs_mean)
        environment = report.environment
        metrics.environment_turns.follow(environment.turns)
        metrics.environment_replayed.follow(environment.replayed)
        metrics.environment_restored.follow(environment.restored)
        metrics.environment_started_over.follow(environment.started_over)
        metrics.environment_lost.follow(environment.lost)
        metrics.environment_hanging.follow(environment.hanging)
        metrics.environment_replaced.follow(environment.replaced_workers)
        metrics.environment_wrong_calls.follow(environment.wrong_calls)
        metrics.engine_steps.follow(engine.steps)
        metrics.engine_busy.follow(engine.busy_seconds)
        metrics.slots.set(engine.slots)
        metrics.running.set(engine.running)
        metrics.waiting.set(engine.waiting)
        metrics.kv_used.set(engine.kv_used)
        metrics.policy_version.set(engine.policy_version)
        metrics.samples_held.set(samples_held)
        metrics.rewards_waiting.set(report.rewards_waiting)
        metrics.rewards_retried.follow(report.rewards.retried)
        for function, reasons in report.rewards.failed.items():
            for reason, count in reasons.items():
                metrics.rewards_failed.of(function, reason).follow(count)
        for function, used in report.rewards.services.items():
            metrics.service_requests.of(function).follow(used.requests)
            metrics.service_seconds.of(function).follow(used.seconds)
            metrics.service_opened.of(function).follow(used.opened)
            for reason, count in used.retries.items():
                metrics.service_retries.of(function, reason).follow(count)
