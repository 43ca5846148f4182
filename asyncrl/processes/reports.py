"""What a generator reports: `GeneratorReport` for the controller, metrics, the engine's log."""

from __future__ import annotations

import msgspec

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
        writer: counts the tokens that verification accepted and rejected.
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
            engine=msgspec.structs.replace(stats, tokens=stats.tokens + self._writer.tokens),
            held=held,
            rewards_waiting=self._rewards.waiting + self._rewards.running,
            rewards_failed=self._rewards.failed,
        )
        self._measure(report, samples_held=held + undelivered)
        if self._log is not None:
            self._log.note(report)
        return report

    def _measure(self, report: GeneratorReport, *, samples_held: int) -> None:
        metrics, engine = self._metrics, report.engine
        metrics.generated_tokens.follow(engine.tokens.generated)
        metrics.drafted_tokens.follow(engine.tokens.drafted)
        metrics.accepted_tokens.follow(engine.tokens.accepted)
        metrics.verified_tokens.follow(engine.tokens.verified)
        metrics.rejected_tokens.follow(engine.tokens.rejected)
        metrics.engine_steps.follow(engine.steps)
        metrics.engine_busy.follow(engine.busy_seconds)
        metrics.slots.set(engine.slots)
        metrics.running.set(engine.running)
        metrics.waiting.set(engine.waiting)
        metrics.kv_used.set(engine.kv_used)
        metrics.policy_version.set(engine.policy_version)
        metrics.samples_held.set(samples_held)
        metrics.rewards_waiting.set(report.rewards_waiting)
        metrics.rewards_failed.follow(report.rewards_failed)
