"""Held-out samples: generated, rewarded, reported and forgotten.

Before and after training, weights do not change, and a sample is generated under the installed
ones. During training it must follow the policy of one version v from its first token on:

    begun under earlier weights ──► v is installed: tokens verified, rest generated ──► reported
    (run-ahead, where tokens can        │
     be verified; else it waits)        └── a newer version is there: it is installed when the
                                            samples of v are finished, or dropped

A round is reported whole or given up, whatever the lengths and texts (docs/decisions/0063).
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from asyncrl.generator.background import BackgroundTasks, ControllerLine
from asyncrl.generator.reports import SampleRecorder
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.generator.sample_state import HeldSample, SampleGeneration
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages import from_generator, to_generator
from asyncrl.wire.messages.to_generator import FixedVersion

AFTER_DUE = 2**31 - 1
"""`GenerateRequest.order` of due held-out samples: after those of the step in training."""
_PIECE_SECONDS = 0.5
"""While an installation is held back, unpaused time is counted in pieces of this length."""


@dataclass(slots=True, eq=False)
class _HeldOut:
    round: int
    fixed: FixedVersion
    task: asyncio.Task[None] | None = None
    generation: SampleGeneration | None = None


@dataclass(eq=False)
class Evaluation:
    """Generates held-out samples.

    `_version` is that of the installed weights, -1 if they are not a policy of the run. `_compared`
    waits until these have been compared with the trainer's.
    """

    _generator: SampleGenerator
    _controller: ControllerLine
    _version: Callable[[], int]
    _compared: Callable[[], Awaitable[None]]
    _recorder: SampleRecorder | None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _fixed: set[_HeldOut] = field(default_factory=set, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _held_seconds: float = field(default=0.0, init=False)
    _holding_since: float | None = field(default=None, init=False)

    @property
    def running(self) -> int:
        """Held-out samples in generation or being scored, without waiting ones."""
        return len(self._tasks) - sum(one.generation is None for one in self._fixed)

    @property
    def in_generation(self) -> list[SampleGeneration]:
        """Held-out samples of a training run; they yield to due samples, as run-ahead does."""
        return [one.generation for one in self._fixed if one.generation is not None]

    def start(self, command: to_generator.Evaluate, tasks: BackgroundTasks) -> asyncio.Task[None]:
        """Generate one held-out sample and report its reward, concurrently."""
        if command.fixed is None:
            task = tasks.start(self._evaluate(command))
        else:
            one = _HeldOut(command.round, command.fixed)
            self._fixed.add(one)
            task = one.task = tasks.start(self._evaluate_fixed(command, one))
            task.add_done_callback(lambda _: self._forget(one))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _forget(self, one: _HeldOut) -> None:
        self._fixed.discard(one)
        if not self._fixed:
            self._held_seconds = 0.0
        self._changed.set()

    async def abandon(self, round_number: int | None = None) -> None:
        """Forget every unreported held-out sample, or those of one round."""
        tasks = list(self._tasks)
        if round_number is not None:
            tasks = [one.task for one in self._fixed if one.round == round_number and one.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def installed(self, version: int) -> None:
        """Verify the samples that new weights made due, and drop those that are too late."""
        self._changed.set()
        for one in list(self._fixed):
            if one not in self._fixed:
                continue  # given up with the one before
            target, generation = one.fixed.policy_version, one.generation
            if target < version:
                await self._miss(one, f"installed version {version} without {target} before it")
                continue
            seed = one.fixed.verify_seed
            if target == version and generation and generation.request_verification(seed, version):
                self._generator.interrupt(generation)

    async def finish_before(self, version: int, is_paused: Callable[[], bool]) -> None:
        """Wait until no sample of an earlier version is left; drop them after `hold_seconds`."""
        while unfinished := self._unfinished(version):
            present = self._version()
            left = min(one.fixed.hold_seconds for one in unfinished) - self._held_seconds
            if left <= 0:
                count, seconds = len(unfinished), unfinished[0].fixed.hold_seconds
                await self._miss(
                    unfinished[0],
                    f"has kept version {present} for {seconds:g} s (evaluation.hold_seconds), and "
                    f"{count} held-out samples are unfinished",
                )
                continue
            self._changed.clear()
            self._holding_since = None if is_paused() else time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, _PIECE_SECONDS)):
                    await self._changed.wait()
            self._held_seconds, self._holding_since = self._held_so_far(), None

    def _held_so_far(self) -> float:
        since = self._holding_since
        return self._held_seconds + (0.0 if since is None else time.monotonic() - since)

    def _unfinished(self, version: int) -> list[_HeldOut]:
        present = self._version()
        if version <= present:
            return []
        return [one for one in self._fixed if one.fixed.policy_version == present]

    async def _miss(self, one: _HeldOut, reason: str) -> None:
        await self._report_missed(one.round, reason)
        await self.abandon(one.round)

    async def _report_missed(self, round_number: int, reason: str) -> None:
        name = self._controller.generator
        missed = from_generator.EvaluationMissed(name, round_number, f"{name} {reason}")
        await self._controller.send(missed)

    async def _evaluate(self, command: to_generator.Evaluate) -> None:
        sample = SampleGeneration(_id(command), command.prompt, command.seed, purpose="eval")
        await self._report(command, await self._generator.generate(sample))

    async def _evaluate_fixed(self, command: to_generator.Evaluate, one: _HeldOut) -> None:
        target = one.fixed.policy_version
        if not one.fixed.ahead:
            await self._is_installed(target)
        ahead = target - self._version()
        if ahead < 0:  # the command came too late
            reason = f"has installed version {self._version()} after {target}"
            await self._report_missed(command.round, reason)
            return
        sample = _id(command), command.prompt, command.seed
        first = SampleGeneration(*sample, priority=ahead, purpose="eval", order=AFTER_DUE)
        held = await self._generate(one, first)
        while held.trajectory.oldest_version < target:
            try:
                await self._is_installed(target)
            except asyncio.CancelledError:
                held.close()
                raise
            again = SampleGeneration(
                _id(command),
                command.prompt,
                one.fixed.verify_seed,
                tokens_to_verify=held.trajectory.kept(),
                min_version=target,
                previously_held=held,
                purpose="eval",
                order=AFTER_DUE,
                episode=held.episode,
            )
            held = await self._generate(one, again)
        await self._report(command, held)

    async def _generate(self, one: _HeldOut, generation: SampleGeneration) -> HeldSample:
        one.generation = generation
        try:
            return await self._generator.generate(generation)
        finally:
            one.generation = None

    async def _is_installed(self, version: int) -> None:
        while self._version() < version:
            self._changed.clear()
            await self._changed.wait()

    async def _report(self, command: to_generator.Evaluate, held: HeldSample) -> None:
        held.close()
        reward, trajectory = await held.reward, held.trajectory
        await self._compared()
        is_shown = command.shown_of and reward.verdict != "unscored"
        if self._recorder is not None and is_shown:
            self._recorder.evaluated(held, reward=reward, shown_of=command.shown_of)
        place = self._controller.generator, command.round, command.index
        oldest, count = trajectory.oldest_version, trajectory.trained_count
        newest = max(segment.policy_version for segment in trajectory.segments)
        answer = from_generator.EvaluationSample(
            *place, reward.value, oldest, newest, count, self._held_so_far(), reward.verdict
        )
        await self._controller.send(answer)


def _id(command: to_generator.Evaluate) -> SampleId:
    return SampleId(group=command.round, sample=command.index)
