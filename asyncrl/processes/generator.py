"""The generator process: an engine, a pool of reward workers, and the samples they made.

commands    consumes: messages of the hub. produces: sample tasks, weight swaps, deliveries.
            waits for: the controller. bounded by: the scheduler's limit on work in flight.
sample      consumes: token chunks, a reward. produces: a held trajectory and its report.
            waits for: the engine, a reward worker. bounded by: tokens, the reward's timeout.
            Told to verify it, what there is of it is begun again as `GenerateRequest.kept`.
delivery    consumes: acknowledgements. produces: deliveries, again when one is not acknowledged.
            waits for: the trainer. bounded by: RESEND_SECONDS.
report      consumes: engine counters. produces: `GeneratorReport`, the time line.
            waits for: the clock. bounded by: REPORT_SECONDS.

A finished trajectory stays here until the trainer has acknowledged it; only its length, versions
and reward go to the controller. So tokens cross the machine once, and a finished sample can still
be verified or discarded by a later decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from asyncrl.config import RunConfig
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.processes.child import ChildSpec, exchange_directory, leaf_of
from asyncrl.processes.kept_samples import KeptSamples
from asyncrl.processes.writer import Draft, HeldSample, SampleWriter
from asyncrl.rewards.pool import RewardPool
from asyncrl.wire import Line
from cache.place import CachePlace
from cache.trajectory import KeptTokens, SampleId, TrajectoryBuilder
from engine.errors import EngineError, EngineStartError, RequestError, WeightsSupersededError
from engine.factory import create_engine
from engine.protocol import Engine, EngineStats, SamplingParams
from engine.weights import read_weights
from monitoring.errors import MonitoringError
from monitoring.exporter import exporter_for
from monitoring.metrics import GeneratorMetrics, new_registry
from monitoring.timeline import SpanKind, Timeline
from scheduler.messages import data, from_generator, to_generator
from scheduler.messages.weights import WeightManifest

logger = logging.getLogger("asyncrl.generator")

REPORT_SECONDS = 0.5
RESEND_SECONDS = 10.0


@dataclass(slots=True)
class Writing:
    """A sample that is being written."""

    draft: Draft
    builder: TrajectoryBuilder
    task: asyncio.Task[None] | None = None

    def begun(self) -> KeptTokens | None:
        """What there is of it, for verification."""
        return self.builder.kept() if len(self.builder) else self.draft.kept


class GeneratorProcess:
    """The loops of one generator. Built by `run_generator`, tested with a fake engine."""

    def __init__(
        self,
        name: str,
        *,
        engine: Engine,
        rewards: RewardPool,
        decode: Callable[[list[int]], str],
        sampling: SamplingParams,
        control: Line[to_generator.ToGenerator],
        data_line: Line[data.ToGeneratorData],
        samples: KeptSamples,
        timeline: Timeline,
        metrics: GeneratorMetrics,
    ) -> None:
        self._name = name
        self._engine = engine
        self._rewards = rewards
        self._writer = SampleWriter(
            engine, rewards, decode=decode, sampling=sampling, metrics=metrics
        )
        self._control = control
        self._data = data_line
        self._samples = samples
        self._timeline = timeline
        self._metrics = metrics
        self._writing: dict[SampleId, Writing] = {}
        self._evaluating: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._held: dict[SampleId, HeldSample] = {}
        self._undelivered: dict[SampleId, tuple[data.TrajectoryDelivery, float]] = {}
        self._swap = asyncio.Lock()
        self._drawing = asyncio.Event()
        """Not paused."""
        self._drawing.set()
        self._background: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._failure: BaseException | None = None
        self._activity_since = time.monotonic()
        self._activity: SpanKind = SpanKind.WAITING

    async def run(self, *, metrics_port: int | None) -> None:
        """Serve until told to shut down. Raises what broke a loop."""
        stats = self._engine.stats()
        await self._control.send(
            from_generator.GeneratorReady(
                self._name, stats.slots, stats.policy_version, metrics_port
            )
        )
        try:
            async with asyncio.TaskGroup() as loops:
                running = [
                    loops.create_task(self._commands()),
                    loops.create_task(self._acknowledgements()),
                    loops.create_task(self._reports()),
                ]
                await self._ended.wait()
                for task in running:
                    task.cancel()
        finally:
            for task in self._background:
                task.cancel()
            self._note_activity(SpanKind.WAITING)
        if self._failure is not None:
            raise self._failure
        await self._control.send(from_generator.Goodbye(self._name))

    async def _commands(self) -> None:
        while not self._ended.is_set():
            await self._carry_out(await self._control.receive())

    async def _carry_out(self, message: to_generator.ToGenerator) -> None:  # noqa: C901 - flat
        match message:
            case to_generator.Generate():
                if message.sample not in self._writing and message.sample not in self._held:
                    self._begin(
                        Draft(message.sample, message.prompt, message.seed, message.priority)
                    )
            case to_generator.Verify():
                for sample, seed in zip(message.samples, message.seeds, strict=True):
                    self._verify(sample, seed, message.least_version)
            case to_generator.Evaluate():
                key = (message.round, message.index)
                self._evaluating[key] = self._start(self._evaluate(message))
            case to_generator.InstallWeights():
                self._start(self._install(message.manifest))
            case to_generator.Deliver():
                for sample in message.samples:
                    await self._deliver(sample, message.step)
            case to_generator.Discard():
                for sample in message.samples:
                    self._discard(sample)
            case to_generator.Pause():
                self._drawing.clear()
                await self._engine.pause()
            case to_generator.Resume():
                await self._engine.resume()
                self._drawing.set()
            case to_generator.Shutdown():
                with contextlib.suppress(EngineError):  # it costs drafts of the next run only
                    await self._engine.save_cache()
                self._ended.set()

    def _begin(self, draft: Draft) -> None:
        """Write a sample beside the loops."""
        writing = Writing(draft, self._writer.builder(draft.sample, draft.prompt))
        self._writing[draft.sample] = writing
        writing.task = self._start(self._write(writing))

    def _verify(self, sample: SampleId, seed: int, least_version: int) -> None:
        """Begin a sample again from what there is of it, if any of that is too old."""
        held, writing = self._held.get(sample), self._writing.get(sample)
        if held is not None:
            if held.trajectory.oldest_version < least_version:
                del self._held[sample]
                kept = held.trajectory.kept()
                self._begin(Draft(sample, held.prompt, seed, 0, least_version, kept, held))
        elif writing is not None and writing.draft.least_version < least_version:
            oldest = writing.builder.oldest_version
            if writing.draft.kept is None and (oldest is None or oldest >= least_version):
                return
            if writing.task is not None:
                writing.task.cancel()
            prompt = writing.draft.prompt
            self._begin(Draft(sample, prompt, seed, 0, least_version, writing.begun()))

    async def _write(self, writing: Writing) -> None:
        """Write one sample, reward it, hold it, report it."""
        sample = writing.draft.sample
        try:
            if writing.draft.kept is not None:
                await self._drawing.wait()  # an engine that is paused may not be able to score
            held = await self._writer.write(writing.draft, writing.builder)
        except AsyncrlError as error:
            await self._report_failure(sample, str(error), isinstance(error, UserError))
        except RequestError as error:
            await self._report_failure(sample, str(error), user_error=False)
        except EngineError as error:
            self._give_up(error)
        else:
            self._held[sample] = held
            trajectory = held.trajectory
            if writing.draft.rewarded is None:
                self._metrics.samples_finished.of(trajectory.finish_reason).inc()
                self._metrics.response_length.observe(len(trajectory.tokens))
            await self._control.send(
                from_generator.SampleFinished(
                    self._name,
                    sample,
                    length=len(trajectory.tokens),
                    oldest_version=trajectory.oldest_version,
                    reward=held.reward,
                    finish_reason=trajectory.finish_reason,
                )
            )
        finally:
            if self._writing.get(sample) is writing:
                del self._writing[sample]

    async def _evaluate(self, order: to_generator.Evaluate) -> None:
        """Write one held-out sample, reward it, report it, forget it."""
        draft = Draft(SampleId(group=order.round, sample=order.index), order.prompt, order.seed)
        builder = self._writer.builder(draft.sample, order.prompt)
        try:
            written = await self._writer.write(draft, builder, purpose="eval")
        except (AsyncrlError, EngineError) as error:
            self._give_up(error)
            return
        finally:
            self._evaluating.pop((order.round, order.index), None)
        await self._control.send(
            from_generator.EvaluationSample(
                self._name,
                order.round,
                order.index,
                written.reward,
                len(written.trajectory.tokens),
                written.trajectory.oldest_version,
            )
        )

    async def _install(self, manifest: WeightManifest) -> None:
        """Swap to these weights; if newer ones took their place, say that nothing changed."""
        started = time.monotonic()
        version = manifest.policy_version
        async with self._swap:
            with self._timeline.span(SpanKind.TRANSFERRING_WEIGHTS, version=version):
                try:
                    # Copied first: the trainer may begin to overwrite them at any moment, and
                    # leaving the block is what says that it had not.
                    with read_weights(manifest) as weights:
                        whole = [(name, tensor.clone()) for name, tensor in weights]
                    await self._engine.update_weights(whole, version)
                except WeightsSupersededError:
                    logger.info("weights of version %d were overtaken by newer ones", version)
                except EngineError as error:
                    self._give_up(error)
                    return
        seconds = time.monotonic() - started
        self._metrics.weights_time.observe(seconds)
        await self._control.send(
            from_generator.WeightsInstalled(
                self._name, self._engine.stats().policy_version, seconds
            )
        )

    async def _deliver(self, sample: SampleId, step: int) -> None:
        held = self._held.pop(sample, None)
        if held is None:
            logger.warning("asked to deliver %s, which is not held here", sample)
            return
        delivery = data.TrajectoryDelivery.of(held.trajectory, reward=held.reward, step=step)
        self._undelivered[sample] = (delivery, time.monotonic())
        self._samples.consider(held.trajectory, held.prompt, reward=held.reward, step=step)
        self._metrics.deliveries.inc()
        await self._data.send(delivery)

    async def _acknowledgements(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESEND_SECONDS):
                    received = await self._data.receive()
                    if self._undelivered.pop(received.sample, None) is not None:
                        await self._control.send(
                            from_generator.SampleDelivered(self._name, received.sample)
                        )
            await self._send_again()

    async def _send_again(self) -> None:
        late = time.monotonic() - RESEND_SECONDS
        for sample, (delivery, sent) in list(self._undelivered.items()):
            if sent < late:
                logger.warning("trajectory %s was not acknowledged; sending it again", sample)
                self._undelivered[sample] = (delivery, time.monotonic())
                self._metrics.deliveries.inc()
                self._metrics.redeliveries.inc()
                await self._data.send(delivery)

    async def _reports(self) -> None:
        while True:
            stats = self._engine.stats()
            self._measure(stats)
            self._note_activity(self._doing())
            await self._control.send(
                from_generator.GeneratorReport(
                    self._name,
                    tokens_generated=stats.tokens_generated,
                    tokens_drafted=stats.tokens_drafted,
                    tokens_accepted=stats.tokens_accepted,
                    tokens_verified=self._writer.tokens_verified,
                    tokens_rejected=self._writer.tokens_rejected,
                    steps=stats.steps,
                    busy_seconds=stats.busy_seconds,
                    running=stats.running,
                    waiting=stats.waiting,
                    held=len(self._held),
                    slots=stats.slots,
                    kv_used=stats.kv_used,
                    policy_version=stats.policy_version,
                    rewards_waiting=self._rewards.waiting + self._rewards.running,
                    rewards_failed=self._rewards.failed,
                )
            )
            # In short naps, so that the time line sees when work ran out and when it came back.
            for _ in range(10):
                await asyncio.sleep(REPORT_SECONDS / 10)
                self._note_activity(self._doing())

    def _measure(self, stats: EngineStats) -> None:
        metrics = self._metrics
        metrics.generated_tokens.follow(stats.tokens_generated)
        metrics.drafted_tokens.follow(stats.tokens_drafted)
        metrics.accepted_tokens.follow(stats.tokens_accepted)
        metrics.verified_tokens.follow(self._writer.tokens_verified)
        metrics.rejected_tokens.follow(self._writer.tokens_rejected)
        metrics.engine_steps.follow(stats.steps)
        metrics.engine_busy.follow(stats.busy_seconds)
        metrics.slots.set(stats.slots)
        metrics.running.set(stats.running)
        metrics.waiting.set(stats.waiting)
        metrics.kv_used.set(stats.kv_used)
        metrics.policy_version.set(stats.policy_version)
        metrics.samples_held.set(len(self._held) + len(self._undelivered))
        metrics.rewards_waiting.set(self._rewards.waiting + self._rewards.running)
        metrics.rewards_failed.follow(self._rewards.failed)

    def _doing(self) -> SpanKind:
        if self._swap.locked():
            return SpanKind.TRANSFERRING_WEIGHTS
        if self._engine.stats().running:
            return SpanKind.EVALUATING if self._evaluating else SpanKind.GENERATING
        rewarding = self._rewards.waiting + self._rewards.running
        return SpanKind.REWARDING if rewarding else SpanKind.WAITING

    def _note_activity(self, kind: SpanKind) -> None:
        """Close the span of the old activity when another one has begun."""
        now = time.monotonic()
        if self._activity is not SpanKind.TRANSFERRING_WEIGHTS and now > self._activity_since:
            cause = {"for": "admissible work"} if self._activity is SpanKind.WAITING else {}
            self._timeline.record(self._activity, self._activity_since, now, **cause)
        self._activity, self._activity_since = kind, now

    def _discard(self, sample: SampleId) -> None:
        writing = self._writing.pop(sample, None)
        if writing is not None and writing.task is not None:
            writing.task.cancel()
        self._held.pop(sample, None)

    async def _report_failure(self, sample: SampleId, reason: str, user_error: bool) -> None:
        logger.error("sample %s failed: %s", sample, reason)
        await self._control.send(
            from_generator.SampleFailed(self._name, sample, reason, user_error)
        )

    def _give_up(self, error: BaseException) -> None:
        """Tell the controller that this process cannot go on, and end."""
        logger.error("this process cannot go on: %s", error)
        self._failure = error
        self._ended.set()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run beside the loops; whatever it did not expect ends the process, with its reason."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._settle)
        return task

    def _settle(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._give_up(error)


async def run_generator(spec: ChildSpec) -> None:
    """Bring up an engine as the run's configuration says, and serve the controller."""
    config = spec.config()
    directory = Path(spec.run_directory)
    control: Line[to_generator.ToGenerator] = Line(
        spec.control_address, spec.name, to_generator.ToGenerator
    )
    registry = new_registry()
    metrics = GeneratorMetrics.register(registry, spec.name)
    async with contextlib.AsyncExitStack() as closing:
        closing.callback(control.close)
        timeline = Timeline(
            directory / "timeline" / f"{spec.name}.jsonl" if config.monitoring.timeline else None,
            spec.name,
            observe=metrics.observe_span,
        )
        closing.callback(timeline.close)
        try:
            with timeline.span(SpanKind.STARTING):
                exporter = exporter_for(config.monitoring, registry, spec.process_index)
                if exporter is not None:
                    closing.callback(exporter.close)
                engine_config = config.engine.model_copy(update={"threads": spec.threads})
                tokenizer = AutoTokenizer.from_pretrained(spec.model_path)
                engine = create_engine(
                    engine_config,
                    spec.model_path,
                    cache_config=config.cache,
                    seed=config.run.seed,
                    place=_place(spec, config, tokenizer),
                )
                closing.push_async_callback(engine.close)
                rewards = RewardPool(config.rewards)
                closing.push_async_callback(rewards.close)
                await rewards.start()
                await engine.start()
            process = GeneratorProcess(
                spec.name,
                engine=engine,
                rewards=rewards,
                decode=lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
                sampling=config.sampling.params(
                    stop_tokens=spec.stop_tokens,
                    top_k_logprobs=config.engine.top_k_logprobs,
                    seed=None,
                ),
                control=control,
                data_line=Line(spec.data_address, spec.name, data.ToGeneratorData),
                samples=KeptSamples(directory, tokenizer, config),
                timeline=timeline,
                metrics=metrics,
            )
            try:
                await process.run(metrics_port=None if exporter is None else exporter.port)
            except BaseExceptionGroup as group:
                raise leaf_of(group) from group
        except (AsyncrlError, EngineError, MonitoringError) as error:
            # A replacement fails where the first one did not: that is not the user's mistake.
            at_fault = isinstance(error, UserError) or (
                spec.first and isinstance(error, EngineStartError | MonitoringError | RequestError)
            )
            await control.send(from_generator.Failure(spec.name, str(error), at_fault))
            raise


def _place(spec: ChildSpec, config: RunConfig, tokenizer: Any) -> CachePlace:
    """Generators of a run share what they write; a resumed run drafts from what it had written."""
    exchange = None
    if config.launcher.generators > 1:
        exchange = str(exchange_directory(config.run.name, spec.parent))
    words = sorted(tokenizer.get_vocab().items())
    digest = hashlib.blake2b(repr(words).encode(), digest_size=16).hexdigest()
    return CachePlace(
        name=spec.name,
        exchange=exchange,
        snapshot=str(Path(spec.run_directory) / "cache" / f"{spec.name}.snapshot"),
        fingerprint=f"tokenizer {digest}",
    )
