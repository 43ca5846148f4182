"""A generator's reports: `GeneratorReport` for the controller, metrics, log, recorded samples.

The engine's log, `RUN/engine/NAME.jsonl`, has one line per report. The simulator fits its cost
model to these lines (docs/modes.md). Counters restart at 0 with each process.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.run_config import RunConfig
from asyncrl.engine.protocol import Engine
from asyncrl.generator.activity import Activity
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.generator.sample_state import HeldSample
from asyncrl.generator.sample_traces import SampleTraces
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics
from asyncrl.monitoring.records.jsonl import RetryingJsonlWriter
from asyncrl.monitoring.records.samples import (
    RECENT,
    RecentSamples,
    SampleLog,
    SampleRecord,
    SampleSegment,
)
from asyncrl.rewards.calls import Reward
from asyncrl.rollout.trajectory import Provenance, SampleId, Trajectory
from asyncrl.wire.messages.from_generator import GeneratorReport
from asyncrl.wire.records.step import EngineStats

_RECENT_GROUPS = 4
"""Groups of each step of which a sample is kept in `recent/`, about."""


class EngineRecord(msgspec.Struct, frozen=True):
    """One line of the log."""

    time: float
    """Unix seconds."""
    engine: EngineStats
    rewards_waiting: int = 0
    lengths: list[int] = []
    """Response lengths of the samples finished since the previous line."""


class EngineLog:
    """Writes the log. Used by one event loop."""

    def __init__(self, path: Path) -> None:
        self._writer = RetryingJsonlWriter[EngineRecord](path)
        self._lengths: list[int] = []

    def add_length(self, length: int) -> None:
        """Add the length of a finished sample to the next line."""
        self._lengths.append(length)

    def append(self, report: GeneratorReport) -> None:
        """Write a line with the counters of this report."""
        now = time.time()  # noqa: TID251 - for its record
        record = EngineRecord(now, report.engine, report.rewards_waiting, self._lengths)
        self._writer.append(record)
        self._lengths = []

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._writer.close()


class SampleRecorder:
    """Writes samples with the history of each token: one of every n-th step, a few of recent ones.

    The former go to `samples.jsonl`, the latter to `recent/NAME.jsonl`, which forgets older steps.
    Samples are chosen by their numbers, so every generator knows them, and independently of their
    texts: the first one delivered would more often be short. The controller chooses evaluations'.
    """

    def __init__(self, directory: Path, tokenizer: Any, config: RunConfig, name: str) -> None:
        self._path = directory / "samples.jsonl"
        self._log = SampleLog(self._path)
        self._recent = RecentSamples(directory / RECENT / f"{name}.jsonl")
        self._texts: dict[int, str] = {}
        self._tokenizer = tokenizer
        self._is_on = config.monitoring.report_samples > 0
        self._every = max(1, config.run.steps // max(1, 2 * config.monitoring.report_samples))
        self._groups_per_step = config.scheduler.groups_per_step
        self._group_size = config.scheduler.group_size
        self._labels = config.reward_labels

    def consider(self, held: HeldSample, *, reward: Reward, step: int) -> None:
        """Record this sample if it is one of the chosen ones of its step."""
        sample = held.trajectory.id
        stays = step % self._every == 0 and self._is_chosen(sample, step)
        is_recent = self._is_on and self._is_recent(sample, step)
        if stays or is_recent:
            record = self._record_of(held, reward, step)
            if stays:
                self._log.append(record)
            if is_recent:
                self._recent.append(record)

    def evaluated(self, held: HeldSample, *, reward: Reward, shown_of: str) -> None:
        """Record a sample of an evaluation of this set."""
        if self._is_on:
            version = held.trajectory.oldest_version
            self._log.append(self._record_of(held, reward, version, shown_of))

    def _record_of(
        self, held: HeldSample, reward: Reward, step: int, evaluation: str = ""
    ) -> SampleRecord:
        trajectory, example = held.trajectory, held.prompt.example
        answer = example.get("answer")
        prompt = str(example.get("prompt", ""))
        if held.episode is not None and len(held.episode.prompt):  # the environment's
            prompt = str(self._tokenizer.decode(held.episode.prompt.tolist()))
        return SampleRecord(
            step=step,
            prompt=prompt,
            tokens=[self._text(token) for token in trajectory.tokens.tolist()],
            provenance=[
                Provenance(value).name.lower()  # type: ignore[misc]
                for value in trajectory.provenance.tolist()
            ],
            contexts=list(trajectory.contexts),
            segments=[SampleSegment(s.policy_version, s.start, s.end) for s in trajectory.segments],
            reward=reward.value,
            rewards=dict(zip(self._labels, reward.terms, strict=False)),
            answer=None if answer is None else str(answer),
            logprobs=trajectory.behaviour_logprobs.tolist(),
            sample_id=str(trajectory.id),
            finish_reason=trajectory.finish_reason,
            evaluation=evaluation,
        )

    def _text(self, token: int) -> str:
        found = self._texts.get(token)
        if found is None:
            found = self._texts[token] = str(self._tokenizer.decode([token]))
        return found

    def _is_recent(self, sample: SampleId, step: int) -> bool:
        """Return True for one sample of some groups, other ones in each step."""
        stride = max(1, self._groups_per_step // _RECENT_GROUPS)
        turn = sample.group // stride + step
        return (sample.group + step) % stride == 0 and sample.sample == turn % self._group_size

    def _is_chosen(self, sample: SampleId, step: int) -> bool:
        """Return True for a step's recorded sample: its place in group and step rotates."""
        record = step // self._every
        place = record % self._groups_per_step
        is_in_place = sample.group % self._groups_per_step == place
        return is_in_place and sample.sample == record % self._group_size

    def rewind(self) -> None:
        """Reopen the file: the run returned to an earlier step, and the controller rewrote it."""
        self._log.close()
        self._log = SampleLog(self._path)
        self._recent.forget()

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._log.close()
        self._recent.close()


@dataclass(frozen=True, slots=True)
class GeneratorRecords:
    """Sinks of a generator's records."""

    metrics: GeneratorMetrics
    activity: Activity
    engine_log: EngineLog | None = None
    samples: SampleRecorder | None = None
    traces: SampleTraces | None = None


@dataclass(eq=False)
class GeneratorReports:
    """Collects the counters of one generator."""

    _name: str
    _engine: Engine
    _generator: SampleGenerator
    _metrics: GeneratorMetrics
    _log: EngineLog | None

    def count_finished(self, trajectory: Trajectory) -> None:
        """Count a finished sample and its length, without observed tokens."""
        length = trajectory.trained_count
        self._metrics.samples_finished.of(trajectory.finish_reason).inc()
        self._metrics.response_length.observe(length)
        if self._log is not None:
            self._log.add_length(length)

    def report(
        self,
        *,
        held: int,
        unacknowledged: int,
        unrewarded: tuple[int, int] = (0, 0),
        due_wait: float = 0.0,
        in_environments: int = 0,
    ) -> GeneratorReport:
        """Update the metrics, log the counters and return them for the controller.

        `held` samples are not delivered, `unacknowledged` ones are; `unrewarded` is a step and its
        number of samples without reward; `due_wait` is a due sample's longest wait, in seconds.
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
            reward_wait=self._generator.rewards.wait(*unrewarded),
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
