"""The generator process: an engine, reward workers, and the samples they generate.

commands    consumes: commands of the controller. produces: calls of the collaborators below.
            waits for: the controller. bounded by: the scheduler's limit on work in flight.
samples     consumes: token chunks. produces: held trajectories. (`sample_runner`)
            waits for: the engine. bounded by: max_tokens, a deadline if one is set.
deliveries  consumes: rewards, acknowledgements. produces: trajectories for the trainer, again
            if they are not acknowledged. (`deliveries`)
            waits for: reward workers, the trainer. bounded by: the timeout of rewards,
            RESEND_SECONDS.
weights     consumes: published weights, and rewinds to an earlier policy.
            produces: an engine with a new version, relabelled tokens.
            waits for: the engine's current step. (`weight_installs`)
reports     consumes: counters. produces: `GeneratorReport`, metrics, the timeline; preemption
            and deadlines. waits for: the clock. bounded by: REPORT_SECONDS.

A finished trajectory stays here until the trainer has acknowledged it; the controller receives only
its length and oldest version. So a later decision can still verify or discard it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import Engine, SamplingParams, ScoreRequest
from asyncrl.generator.activity import GeneratorState
from asyncrl.generator.background import BackgroundTasks, ControllerLine
from asyncrl.generator.deliveries import Deliveries, TrainerLines
from asyncrl.generator.evaluation import Evaluation
from asyncrl.generator.lenient_reuse import LenientReuse
from asyncrl.generator.reports import GeneratorRecords, GeneratorReports
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.generator.sample_state import SampleGeneration
from asyncrl.generator.sample_table import Samples
from asyncrl.generator.unfinished_files import UnfinishedFiles
from asyncrl.generator.weight_installs import WeightInstalls
from asyncrl.monitoring.config import set_log_level
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire import Line
from asyncrl.wire.messages import data, from_generator, to_generator
from asyncrl.wire.messages.data import decode_tokens, encode_floats

_MIN_VERIFICATION_SLOTS = 8
"""Least slots for verifying held samples: about one group, whose first the trainer waits for."""
REPORT_SECONDS = 0.5
_NOTES_PER_REPORT = 10
"""The timeline must see when an engine runs out of work and when work returns."""
_Concurrent = to_generator.InstallWeights | to_generator.Deliver | to_generator.Rescore


def choose_preemptions(
    generations: Sequence[SampleGeneration], *, slots: int, kv_full: bool = False
) -> list[SampleGeneration]:
    """Choose run-ahead samples to interrupt for due ones without a slot, the latest steps first.

    Verification of a held sample mostly takes one engine step, so such samples share at most a
    quarter of a large engine's slots. With `kv_full`, due samples wait for KV space, not for slots.
    """
    due = [one for one in generations if one.priority == 0 and not one.keeps_slot]
    waiting = [one for one in due if not one.waits_for_environment]
    if not waiting:
        return []
    held = sum(one.previously_held is not None for one in waiting)
    needed = len(waiting) - held + min(held, max(_MIN_VERIFICATION_SLOTS, slots // 4))
    free = 0 if kv_full else slots - sum(one.keeps_slot for one in generations)
    run_ahead = [one for one in generations if one.priority > 0 and one.keeps_slot]
    run_ahead.sort(key=lambda one: (one.priority, one.sample), reverse=True)
    return run_ahead[: max(0, needed - free)]


async def rescore(
    engine: Engine, sampling: SamplingParams, line: ControllerLine, command: to_generator.Rescore
) -> None:
    """Score samples again and report; the engine recomputes every position."""
    requests = []
    for index, sample in enumerate(command.samples):
        prompt, tokens = decode_tokens(sample.prompt_tokens), decode_tokens(sample.tokens)
        name = f"rescore-{command.number}.{index}"
        requests.append(ScoreRequest(name, prompt, tokens, sampling))
    version, logprobs, reason = -1, tuple[bytes, ...](), ""
    try:
        scores = await engine.score(requests)
    except EngineError as error:
        reason = str(error)
    else:
        version = max((score.policy_version for score in scores), default=-1)
        logprobs = tuple(encode_floats(score.logprobs) for score in scores)
    name = line.generator
    await line.send(from_generator.Rescored(name, command.number, version, logprobs, reason))


class GeneratorProcess:
    """Dispatches commands to its collaborators and reports. Use once: `await process.run()`.

    `controller` and `trainer` (rank 0) are connections, as are `other_ranks` (from 1 on). `engine`
    is started. From the share `kv_limit` of KV space in use on, waiting requests wait for KV space.
    The other arguments are those of `lenient_reuse`, `weight_installs` and `unfinished_files`.
    """

    def __init__(
        self,
        engine: Engine,
        generator: SampleGenerator,
        controller: ControllerLine,
        trainer: Line[data.ToGeneratorData],
        records: GeneratorRecords,
        *,
        lenient_reuse: LenientReuse | None = None,
        kv_limit: float = 1.0,
        stops_on_wrong_policy: bool = True,
        starts_with_policy: bool = True,
        here: Callable[[str], Path] = Path,
        other_ranks: Sequence[Line[data.ToGeneratorData]] = (),
    ) -> None:
        metrics, log = records.metrics, records.engine_log
        self._metrics, self._kv_limit = metrics, kv_limit
        self._engine = engine
        self._generator = generator
        self._controller = controller
        self._activity = records.activity
        tasks = self._tasks = BackgroundTasks()
        self._reports = GeneratorReports(controller.generator, engine, generator, metrics, log)
        self.samples = Samples(generator, controller, self._reports, tasks, lenient_reuse)
        installs = self._installs = WeightInstalls(
            engine,
            self.samples,
            controller,
            metrics,
            self._note,
            verify=self._verify,
            installed=self._installed,
            stops_on_wrong_policy=stops_on_wrong_policy,
            starts_with_policy=starts_with_policy,
        )
        self._evaluation = Evaluation(
            generator, controller, lambda: installs.version, installs.compared, records.samples
        )
        lines = TrainerLines([trainer, *other_ranks])
        self.deliveries = Deliveries(self.samples.held, lines, controller, records, lenient_reuse)
        self._unfinished = UnfinishedFiles(installs, tasks, controller, self._discard, here)
        self._paused_at: float | None = None
        self._one_install = asyncio.Lock()

    async def run(self, *, metrics_port: int | None) -> None:
        """Serve until the shutdown command. Raises the error that ended a loop or a task."""
        slots, version = self._engine.stats().slots, self._installs.version
        weights, name = await self._engine.fingerprint(), self._controller.generator
        ready = from_generator.GeneratorReady(name, slots, version, weights, metrics_port)
        await self._controller.send(ready)
        try:
            async with asyncio.TaskGroup() as loops:
                answers = self.deliveries.receive_answers()
                work = (self._dispatch_commands(), answers, self._report())
                running = [loops.create_task(one) for one in work]
                await self._tasks.wait_for_end()
                for task in running:
                    task.cancel()
        finally:
            self._tasks.cancel()
            self._generator.rewards.close()
            self._activity.close()
        self._tasks.raise_failure()
        await self._controller.send(from_generator.Goodbye(self._controller.generator))

    async def _dispatch_commands(self) -> None:
        while not self._tasks.ended:
            command = await self._controller.receive()
            if isinstance(command, to_generator.SetLogLevel):
                set_log_level(command.level)
            else:
                await self._dispatch(command)

    async def _dispatch(self, command: to_generator.ToGenerator) -> None:
        match command:
            case to_generator.Generate():
                await self._generate(command)
            case to_generator.Verify():
                await self._verify(command)
            case to_generator.Evaluate() | to_generator.AbandonEvaluation():
                await self._evaluate(command)
            case to_generator.InstallWeights() | to_generator.Deliver() | to_generator.Rescore():
                self._start(command)
            case to_generator.Rewind():
                await self._rewind(command)
            case to_generator.SaveUnfinished():
                self._unfinished.save(command)
            case to_generator.Release():
                self._generator.noise_floor.cancel()
                self._tasks.start(self._unfinished.release(command))
            case to_generator.Discard():
                self._discard(command.samples)
            case to_generator.Pause() | to_generator.Resume():
                await self._pause_or_resume(pause=isinstance(command, to_generator.Pause))
            case to_generator.Shutdown():
                with contextlib.suppress(EngineError):  # a resumed run only starts without drafts
                    await self._engine.save_cache()
                self._tasks.end()

    def _discard(self, samples: Sequence[SampleId]) -> None:
        self.samples.discard(samples)
        self.deliveries.discard(samples)

    def _start(self, command: _Concurrent) -> None:
        match command:
            case to_generator.InstallWeights():
                self._generator.noise_floor.cancel()
                self._tasks.start(self._install(command))
            case to_generator.Deliver():
                self._tasks.start(self._deliver(command))
            case to_generator.Rescore():
                sampling = self._generator.sampling
                self._tasks.start(rescore(self._engine, sampling, self._controller, command))

    async def _evaluate(self, one: to_generator.Evaluate | to_generator.AbandonEvaluation) -> None:
        if isinstance(one, to_generator.Evaluate):
            self._evaluation.start(one, self._tasks)
        else:
            await self._evaluation.abandon(one.round)

    async def _install(self, command: to_generator.InstallWeights) -> None:
        version = command.manifest.policy_version
        async with self._one_install:
            await self._evaluation.finish_before(version, lambda: self._paused_at is not None)
            self._generator.noise_floor.cancel()
            await self._installs.install(command)

    async def _installed(self, version: int) -> None:
        await self._evaluation.installed(version)
        if self._evaluation.in_generation:
            self._make_room()

    async def _deliver(self, command: to_generator.Deliver) -> None:
        """Deliver, but no token of weights that are not known to be the trainer's."""
        await self._installs.compared()
        for group in {sample.group for sample in command.samples}:
            await self._unfinished.copied(group)
        await self.deliveries.deliver(command)

    async def _generate(self, command: to_generator.Generate) -> None:
        self.samples.generate(command, await self._unfinished.read(command))
        if command.priority == 0:
            self._make_room()

    async def _verify(self, command: to_generator.Verify) -> None:
        for sample, seed in zip(command.samples, command.seeds, strict=True):
            await self.samples.verify(sample, seed, command.min_version)
        self._make_room()
        self._note()  # a verification may be over within the next engine step

    async def _rewind(self, command: to_generator.Rewind) -> None:
        """Rewind, and dispatch nothing until it is done: later commands are of the new lineage."""
        self._generator.noise_floor.cancel()
        self.deliveries.rewind(command.lineage)
        await self._evaluation.abandon()
        await self._installs.rewind(command)
        self._note()

    async def _pause_or_resume(self, *, pause: bool) -> None:
        if pause:
            self._paused_at = self._paused_at or time.monotonic()
            self._generator.set_engine_paused(True)
            await self._engine.pause()
            return
        await self._engine.resume()
        self._generator.set_engine_paused(False)
        if self._paused_at is not None:
            self.samples.extend_deadlines(time.monotonic() - self._paused_at)
            self._paused_at = None

    def _make_room(self) -> None:
        """Interrupt as much run-ahead as due samples need slots; it resumes in free slots."""
        stats = self._engine.stats()
        for generation in choose_preemptions(
            [*self.samples.in_generation, *self._evaluation.in_generation],
            slots=stats.slots,
            kv_full=stats.kv_used >= self._kv_limit and stats.waiting > 0,
        ):
            self._metrics.preempted.inc()
            self._generator.interrupt(generation)

    async def _report(self) -> None:
        while True:
            self._note()
            await self._controller.send(
                self._reports.report(
                    held=len(self.samples.held),
                    unacknowledged=self.deliveries.unacknowledged,
                    unrewarded=self.deliveries.unrewarded,
                    due_wait=self.samples.longest_due_wait(time.monotonic()),
                    in_environments=self.samples.in_environments,
                )
            )
            due = self.samples.due
            for _ in range(_NOTES_PER_REPORT):
                await asyncio.sleep(REPORT_SECONDS / _NOTES_PER_REPORT)
                self._note()
                self._make_room()
                self.end_overdue()
                before, due = due, self.samples.due
                if before and not due:
                    break  # a short step may end before the next report

    def end_overdue(self) -> None:
        """End the samples that are past their deadline, unless the engine is paused."""
        if self._paused_at is None:
            self.samples.end_overdue()

    def _note(self) -> None:
        stats = self._engine.stats()
        generations = self.samples.needing_slots
        verifying = sum(one.awaits_verification for one in generations)
        run_ahead = sum(one.priority > 0 and not one.awaits_verification for one in generations)
        self._activity.note(
            GeneratorState(
                slots=stats.slots,
                running=stats.running,
                primary=len(generations) - verifying - run_ahead,
                verifying=verifying + self._generator.noise_floor.running,
                run_ahead=run_ahead,
                evaluating=self._evaluation.running,
                rewarding=self._generator.rewards.pending,
                environment=self.samples.in_environments + self._generator.held_out_in_environments,
                installing=self._installs.installing,
                paused=self._paused_at is not None,
                held=len(self.samples.held),
                delivered_step=self.deliveries.newest_step,
                policy_version=stats.policy_version,
            )
        )
