"""The generator process: an engine, a pool of reward workers, and the samples they made.

commands    consumes: messages of the hub. produces: sample tasks, weight swaps, deliveries.
            waits for: the controller. bounded by: the scheduler's limit on work in flight.
sample      consumes: token chunks. produces: a held trajectory and its report.
            waits for: the engine. bounded by: tokens, a deadline if one is set.
            Interrupted it goes on from what it has (`processes.writing`).
delivery    consumes: rewards, acknowledgements. produces: deliveries, again when one is not
            acknowledged. waits for: reward workers, the trainer. bounded by: the reward's timeout,
            RESEND_SECONDS.
report      consumes: engine counters. produces: `GeneratorReport`, the time line.
            waits for: the clock. bounded by: REPORT_SECONDS.

A finished trajectory stays here until the trainer has acknowledged it; only its length and
oldest version go to the controller. So tokens cross the machine once, and a finished sample can
still be verified or discarded by a later decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine

from asyncrl.errors import AsyncrlError, UserError
from asyncrl.processes.activity import Activity, Doing
from asyncrl.processes.earlier import EarlierRollouts
from asyncrl.processes.engine_log import EngineLog
from asyncrl.processes.kept_samples import KeptSamples
from asyncrl.processes.reports import GeneratorReports
from asyncrl.processes.weight_installs import WeightInstalls
from asyncrl.processes.writer import SampleWriter
from asyncrl.processes.writing import HeldSample, Writing, excess
from asyncrl.rewards.pool import RewardPool
from engine.errors import EngineError, RequestError
from engine.protocol import Engine, SamplingParams
from monitoring.metrics import GeneratorMetrics
from rollout.trajectory import SampleId
from wire import Line
from wire.frames import encode_trajectory
from wire.messages import data, from_generator, to_generator

logger = logging.getLogger("asyncrl.generator")

REPORT_SECONDS = 0.5
RESEND_SECONDS = 10.0


class GeneratorProcess:
    """The loops of one generator. Built by `run_generator`; tested with a fake engine."""

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
        activity: Activity,
        metrics: GeneratorMetrics,
        log: EngineLog | None = None,
        earlier: EarlierRollouts | None = None,
        deadline: float | None = None,
        kv_limit: float = 1.0,
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
        self._metrics = metrics
        self._reporter = GeneratorReports(
            name, engine=engine, writer=self._writer, rewards=rewards, metrics=metrics, log=log
        )
        self._installs = WeightInstalls(
            name,
            engine,
            send=control.send,
            metrics=metrics,
            on_change=self._note,
            release_kv=self._interrupt_all,
            resume=self._writer.go_on,
        )
        self._deadline, self._kv_limit = deadline, kv_limit
        self._earlier = earlier
        self._activity = activity
        self._writing: dict[SampleId, Writing] = {}
        self._tasks: dict[SampleId, asyncio.Task[None]] = {}
        self._evaluating: dict[tuple[int, int], Writing] = {}
        self._held: dict[SampleId, HeldSample] = {}
        self._undelivered: dict[SampleId, tuple[data.TrajectoryDelivery, float]] = {}
        self._paused_at: float | None = None
        self._delivered_step = -1
        self._background: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._failure: BaseException | None = None

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
            self._writer.close()
            self._activity.close()
        if self._failure is not None:
            raise self._failure
        await self._control.send(from_generator.Goodbye(self._name))

    async def _commands(self) -> None:
        while not self._ended.is_set():
            await self._carry_out(await self._control.receive())

    async def _carry_out(self, message: to_generator.ToGenerator) -> None:  # noqa: C901 - flat
        match message:
            case to_generator.Generate():
                await self._generate(message)
            case to_generator.Verify():
                for sample, seed in zip(message.samples, message.seeds, strict=True):
                    await self._verify(sample, seed, message.min_version)
                await self._make_room()
                self._note()  # a verification may be over within the next engine step
            case to_generator.Evaluate():
                self._start(self._evaluate(message))
            case to_generator.InstallWeights():
                self._start(self._installs.install(message.manifest, rebuild_kv=message.rebuild_kv))
            case to_generator.Deliver():
                self._start(self._deliver(message))
            case to_generator.Discard():
                for sample in message.samples:
                    self._discard(sample)
            case to_generator.Pause():
                self._paused_at = self._paused_at or time.monotonic()
                self._writer.paused(True)
                await self._engine.pause()
            case to_generator.Resume():
                await self._engine.resume()
                self._writer.paused(False)
                self._forgive_pause()
            case to_generator.Shutdown():
                with contextlib.suppress(EngineError):  # it costs drafts of the next run only
                    await self._engine.save_cache()
                self._ended.set()

    async def _generate(self, order: to_generator.Generate) -> None:
        sample = order.sample
        if sample in self._writing or sample in self._held:
            return
        kept = None
        if self._earlier is not None:
            kept = self._earlier.kept(order.prompt.prompt_id, sample.sample)
        self._begin(Writing(sample, order.prompt, order.seed, order.priority, kept))
        if order.priority == 0:
            await self._make_room()

    def _begin(self, writing: Writing) -> None:
        """Write a sample beside the loops."""
        self._writing[writing.sample] = writing
        self._tasks[writing.sample] = self._start(self._write(writing))

    async def _verify(self, sample: SampleId, seed: int, min_version: int) -> None:
        """Have what there is of a sample verified, if any of that is too old."""
        held, writing = self._held.get(sample), self._writing.get(sample)
        if held is not None and held.trajectory.oldest_version < min_version:
            del self._held[sample]
            again = Writing(
                sample,
                held.prompt,
                seed,
                kept=held.trajectory.kept(),
                min_version=min_version,
                rewarded=held,
            )
            self._begin(again)
        elif writing is not None and writing.order(seed, min_version):
            await self._writer.interrupt(writing)

    async def _make_room(self) -> None:
        """Have run-ahead give slots back that due samples need; it goes on when there are some."""
        stats = self._engine.stats()
        for writing in excess(
            list(self._writing.values()),
            slots=stats.slots,
            kv_full=stats.kv_used >= self._kv_limit and stats.waiting > 0,
        ):
            self._metrics.preempted.inc()
            await self._writer.interrupt(writing)

    def _forgive_pause(self) -> None:
        """The end of a pause, which counts towards no deadline."""
        if self._paused_at is not None:
            paused, self._paused_at = time.monotonic() - self._paused_at, None
            for writing in self._writing.values():
                if writing.began is not None:
                    writing.began += paused

    async def _end_late_samples(self) -> None:
        """End what is past its deadline with the tokens that it has."""
        if self._deadline is None or self._paused_at is not None:
            return
        late = time.monotonic() - self._deadline
        for writing in list(self._writing.values()):
            begun = writing.began is not None and writing.began < late
            if begun and not writing.verifying and not writing.expired:
                writing.expired = True
                await self._writer.interrupt(writing)

    async def _write(self, writing: Writing) -> None:
        """Write one sample, hold it, report it."""
        sample = writing.sample
        try:
            held = await self._writer.write(writing)
        except RequestError as error:
            await self._report_failure(sample, error)
        except EngineError as error:
            self._give_up(error)
        else:
            self._held[sample] = held
            trajectory = held.trajectory
            if writing.rewarded is None:
                self._reporter.sample_finished(trajectory.finish_reason, len(trajectory.tokens))
            await self._control.send(
                from_generator.SampleFinished(
                    self._name,
                    sample,
                    length=len(trajectory.tokens),
                    oldest_version=trajectory.oldest_version,
                    finish_reason=trajectory.finish_reason,
                )
            )
        finally:
            if self._writing.get(sample) is writing:
                del self._writing[sample], self._tasks[sample]

    async def _evaluate(self, order: to_generator.Evaluate) -> None:
        """Write one held-out sample, reward it, report it, forget it."""
        name = SampleId(group=order.round, sample=order.index)
        writing = Writing(name, order.prompt, order.seed, purpose="eval")
        self._evaluating[order.round, order.index] = writing
        try:
            written = await self._writer.write(writing)
            reward = await written.reward
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
                reward,
                len(written.trajectory.tokens),
                written.trajectory.oldest_version,
            )
        )

    async def _interrupt_all(self) -> None:
        """Have nothing served until the writer goes on; samples then go on from what they have."""
        self._writer.hold()
        for writing in list(self._writing.values()):
            await self._writer.interrupt(writing)

    async def _deliver(self, order: to_generator.Deliver) -> None:
        """Send samples of one group, once all their rewards are there."""
        ready: list[tuple[HeldSample, float]] = []
        for sample in order.samples:
            held = self._held.get(sample)
            if held is None:
                # Discarded meanwhile, or a bug: then the group is left out, and not waited for.
                await self._report_failure(sample, AsyncrlError("it is not held here"))
                return
            try:
                ready.append((held, await held.reward))
            except AsyncrlError as error:
                await self._report_failure(sample, error)
                return  # its group is left out
        for held, reward in ready:
            if self._held.pop(held.trajectory.id, None) is held:  # not discarded meanwhile
                await self._send_delivery(held, reward, order.step)

    async def _send_delivery(self, held: HeldSample, reward: float, step: int) -> None:
        trajectory = held.trajectory
        delivery = encode_trajectory(trajectory, reward=reward, step=step)
        self._undelivered[trajectory.id] = (delivery, time.monotonic())
        self._delivered_step = max(self._delivered_step, step)
        if self._earlier is not None:
            self._earlier.remember(trajectory)
        self._samples.consider(trajectory, held.prompt, reward=reward, step=step)
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
            self._note()
            report = self._reporter.report(held=len(self._held), undelivered=len(self._undelivered))
            await self._control.send(report)
            # In short naps, so that the time line sees when work ran out and when it came back.
            for _ in range(10):
                await asyncio.sleep(REPORT_SECONDS / 10)
                self._note()
                await self._make_room()
                await self._end_late_samples()

    def _note(self) -> None:
        """Tell the time line what is the case now."""
        stats = self._engine.stats()
        written = list(self._writing.values())
        verifying = sum(w.verifying for w in written)
        run_ahead = sum(w.priority > 0 and not w.verifying for w in written)
        self._activity.note(
            Doing(
                slots=stats.slots,
                running=stats.running,
                primary=len(written) - verifying - run_ahead,
                verifying=verifying,
                run_ahead=run_ahead,
                evaluating=len(self._evaluating),
                rewarding=self._rewards.waiting + self._rewards.running,
                installing=self._installs.installing,
                paused=self._paused_at is not None,
                held=len(self._held),
                delivered_step=self._delivered_step,
                policy_version=stats.policy_version,
            )
        )

    def _discard(self, sample: SampleId) -> None:
        self._writing.pop(sample, None)
        task = self._tasks.pop(sample, None)
        if task is not None:
            task.cancel()
        self._held.pop(sample, None)

    async def _report_failure(self, sample: SampleId, error: Exception) -> None:
        logger.error("sample %s failed: %s", sample, error)
        at_fault = isinstance(error, UserError)
        await self._control.send(
            from_generator.SampleFailed(self._name, sample, str(error), at_fault)
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
