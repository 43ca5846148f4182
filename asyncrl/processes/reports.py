"""What a generator reports: `GeneratorReport` for the controller, metrics, the engine's log."""

from __future__ import annotations

from asyncrl.processes.engine_log import EngineLog
from asyncrl.processes.writer import SampleWriter
from asyncrl.rewards.pool import RewardPool
from engine.protocol import Engine
from monitoring.metrics import GeneratorMetrics
from wire.messages.from_generator import GeneratorReport


class GeneratorReports:
    """Collects the counters of one generator.

    Args:
        name: of the generator.
        engine: its engine.
        writer: counts verified tokens.
        rewards: its reward workers.
        metrics: follow the counters.
        log: gets a line for each report; None: no log.
    """

    def __init__(
        self,
        name: str,
        *,
        engine: Engine,
        writer: SampleWriter,
        rewards: RewardPool,
        metrics: GeneratorMetrics,
        log: EngineLog | None,
    ) -> None:
        self._name = name
        self._engine = engine
        self._writer = writer
        self._rewards = rewards
        self._metrics = metrics
        self._log = log

    def sample_finished(self, finish_reason: str, length: int) -> None:
        """Count a sample that ended for this reason with so many response tokens."""
        self._metrics.samples_finished.of(finish_reason).inc()
        self._metrics.response_length.observe(length)
        if self._log is not None:
            self._log.finished(length)

    def report(self, *, held: int, undelivered: int) -> GeneratorReport:
        """Bring the metrics up to date, log the counters and return them for the controller.

        Args:
            held: finished samples that were not delivered.
            undelivered: samples that were delivered and not acknowledged yet.
        """
        stats = self._engine.stats()
        report = GeneratorReport(
            self._name,
            tokens_generated=stats.tokens_generated,
            tokens_drafted=stats.tokens_drafted,
            tokens_accepted=stats.tokens_accepted,
            tokens_verified=self._writer.tokens_verified,
            tokens_rejected=self._writer.tokens_rejected,
            tokens_outside_top_k=self._writer.tokens_outside_top_k,
            steps=stats.steps,
            busy_seconds=stats.busy_seconds,
            running=stats.running,
            waiting=stats.waiting,
            held=held,
            slots=stats.slots,
            kv_used=stats.kv_used,
            policy_version=stats.policy_version,
            rewards_waiting=self._rewards.waiting + self._rewards.running,
            rewards_failed=self._rewards.failed,
        )
        self._measure(report, samples_held=held + undelivered)
        if self._log is not None:
            self._log.note(report)
        return report

    def _measure(self, report: GeneratorReport, *, samples_held: int) -> None:
        metrics = self._metrics
        metrics.generated_tokens.follow(report.tokens_generated)
        metrics.drafted_tokens.follow(report.tokens_drafted)
        metrics.accepted_tokens.follow(report.tokens_accepted)
        metrics.verified_tokens.follow(report.tokens_verified)
        metrics.rejected_tokens.follow(report.tokens_rejected)
        metrics.engine_steps.follow(report.steps)
        metrics.engine_busy.follow(report.busy_seconds)
        metrics.slots.set(report.slots)
        metrics.running.set(report.running)
        metrics.waiting.set(report.waiting)
        metrics.kv_used.set(report.kv_used)
        metrics.policy_version.set(report.policy_version)
        metrics.samples_held.set(samples_held)
        metrics.rewards_waiting.set(report.rewards_waiting)
        metrics.rewards_failed.follow(report.rewards_failed)
