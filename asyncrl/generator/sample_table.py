"""The samples of one generator: in generation, or finished and held until they are delivered."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from asyncrl.engine.errors import RequestError
from asyncrl.environments.workers.pool import EnvironmentFailed
from asyncrl.errors import AsyncrlError
from asyncrl.generator.background import BackgroundTasks, ControllerLine
from asyncrl.generator.lenient_reuse import LenientReuse
from asyncrl.generator.reports import GeneratorReports
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.generator.sample_state import HeldSample, SampleGeneration
from asyncrl.rollout.trajectory import KeptTokens, SampleId
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.wire.messages import from_generator, to_generator
from asyncrl.wire.messages.data import digest_of, encode_trajectory

Unfinished = tuple[SampleId, str, KeptTokens]
"""An undelivered sample, the id of its prompt, and its tokens."""


@dataclass(eq=False)
class Samples:
    """Starts, verifies, interrupts and discards samples; holds and reports the finished ones."""

    _generator: SampleGenerator
    _controller: ControllerLine
    _reports: GeneratorReports
    _tasks: BackgroundTasks
    _lenient_reuse: LenientReuse | None
    tells_rewards: bool = field(default=False, init=False)
    """True if rewards are reported to the controller (dynamic sampling)."""
    held: dict[SampleId, HeldSample] = field(default_factory=dict, init=False)
    _lineage: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._generating: dict[SampleId, tuple[SampleGeneration, asyncio.Task[None]]] = {}

    @property
    def in_generation(self) -> list[SampleGeneration]:
        """All unfinished samples."""
        return [generation for generation, _ in self._generating.values()]

    @property
    def needing_slots(self) -> list[SampleGeneration]:
        """Samples that have a slot or wait for one."""
        return [one for one in self.in_generation if not one.waits_for_environment]

    @property
    def in_environments(self) -> int:
        """Samples that wait for their environment before they need a slot."""
        return len(self._generating) - len(self.needing_slots)

    @property
    def due(self) -> int:
        """Number of unfinished samples that the coming step waits for."""
        return sum(one.priority == 0 for one in self.in_generation)

    def longest_due_wait(self, now: float) -> float:
        """Longest wait of a due sample for its first token, in seconds; 0 if none waits."""
        due = (one for one in self.in_generation if one.priority == 0 and not one.has_slot)
        waits = (now - one.requested_at for one in due if one.request_id is not None)
        return max(waits, default=0.0)

    def generate(self, command: to_generator.Generate, restored: KeptTokens | None) -> None:
        """Start a sample unless it is known; `restored` are its tokens from before a resume."""
        sample, prompt = command.sample, command.prompt
        if sample in self._generating or sample in self.held:
            return
        tokens, seed = restored, command.seed
        if restored is not None and command.unfinished is not None:
            seed = command.unfinished.seed
        elif self._lenient_reuse is not None:
            tokens = self._lenient_reuse.tokens_to_verify(prompt.prompt_id, sample.sample)
        generation = SampleGeneration(sample, prompt, seed, command.priority, tokens)
        generation.deadline_seconds = command.deadline_seconds
        generation.environment_seed = command.seed
        self._start(generation)

    async def verify(self, sample: SampleId, seed: int, min_version: int) -> None:
        """Verify a sample with a token older than `min_version`; else report a held one again."""
        held = self.held.get(sample)
        if held is not None:
            if held.trajectory.oldest_version >= min_version:
                await self._report_finished(held)
                return
            del self.held[sample]
            again = SampleGeneration(
                sample,
                held.prompt,
                seed,
                tokens_to_verify=held.trajectory.kept(),
                min_version=min_version,
                previously_held=held,
                deadline_seconds=held.deadline_seconds,
                episode=held.episode,
            )
            self._start(again)
        elif sample in self._generating:
            generation, _ = self._generating[sample]
            if generation.request_verification(seed, min_version):
                self._generator.interrupt(generation)

    def end_overdue(self) -> None:
        """Interrupt samples past their deadline; they end with their tokens and reason `deadline`.

        Time runs from the first token. Verification has no deadline: its tokens would be unusable.
        """
        now = time.monotonic()
        for generation in self.in_generation:
            started, seconds = generation.first_token_at, generation.deadline_seconds
            if started is None or seconds is None or now - started <= seconds:
                continue
            if not generation.awaits_verification and not generation.expired:
                generation.expired = True
                self._generator.interrupt(generation)

    def extend_deadlines(self, seconds: float) -> None:
        """Extend every sample's deadline by the time for which the engine was paused."""
        for generation in self.in_generation:
            if generation.first_token_at is not None:
                generation.first_token_at += seconds

    def interrupt_all(self) -> None:
        """Interrupt every sample; none resumes before `resume_all`."""
        self._generator.attempts_allowed.clear()
        for generation in self.in_generation:
            self._generator.interrupt(generation)

    async def rewind(self, version: int, lineage: int, *, newest: int) -> None:
        """Forget the policies after this version. No sample resumes before `resume_all`.

        `lineage` is of the trainer that continues; `newest` is the version of the engine's weights.
        """
        self.interrupt_all()
        await self._generator.attempts_ended()
        for sample, held in self.held.items():
            self.held[sample] = held.without_versions_after(version)
        for generation in self.in_generation:
            generation.rewind(version, lineage, versions_gone=newest - version)
        self._lineage = lineage

    async def unfinished(self, wanted: Callable[[SampleId], bool]) -> list[Unfinished]:
        """Interrupt all samples, and copy the tokens of those that are wanted.

        Tokens are copied after an interruption because an engine reports the end of an answer
        earlier than other tokens: an unreported end would reveal something of the tokens that
        follow (docs/decisions/0011). No sample resumes before `resume_all`.

        Finished samples are included. Raises EngineError if the engine did not end its requests.
        """
        self.interrupt_all()
        await self._generator.attempts_ended()
        found = [
            (sample, held.prompt.prompt_id, held.trajectory.kept())
            for sample, held in self.held.items()
            if wanted(sample)
        ]
        for one in self.in_generation:
            if wanted(one.sample) and one.sample not in self.held:
                kept = one.unfinished()
                if kept is not None:
                    found.append((one.sample, one.prompt.prompt_id, kept))
        return found

    def resume_all(self) -> None:
        """Resume the samples from their tokens."""
        self._generator.attempts_allowed.set()

    def discard(self, samples: Sequence[SampleId]) -> None:
        """Forget these samples, finished or not."""
        for sample in samples:
            if sample in self._generating:
                generation, task = self._generating.pop(sample)
                task.cancel()
                if generation.episode is not None:  # a task that never ran does not close it
                    generation.episode.close()
            held = self.held.pop(sample, None)
            if held is not None:
                held.close()

    async def _report_finished(self, held: HeldSample, *, urgent: bool = True) -> None:
        trajectory = held.trajectory
        digest = digest_of(encode_trajectory(trajectory, reward=0.0, step=0))
        finished = from_generator.SampleFinished(
            self._controller.generator,
            trajectory.id,
            length=len(trajectory.tokens),
            oldest_version=trajectory.oldest_version,
            finish_reason=trajectory.finish_reason,
            digest=digest,
        )
        await self._controller.send(finished, urgent=urgent)
        if self.tells_rewards:
            self._tasks.start(self._tell_reward(held, digest, urgent=urgent))

    async def _tell_reward(self, held: HeldSample, digest: bytes, *, urgent: bool) -> None:
        sample = held.trajectory.id
        try:
            reward = await asyncio.shield(held.reward)
        except AsyncrlError as error:
            if self.held.get(sample) is held:
                await self._controller.report_failed_sample(sample, error)
            return
        if self.held.get(sample) is held:
            name = self._controller.generator
            told = from_generator.SampleRewarded(name, sample, reward.value, digest)
            await self._controller.send(told, urgent=urgent)

    def _start(self, generation: SampleGeneration) -> None:
        generation.lineage = self._lineage
        task = self._tasks.start(self._run(generation))
        self._generating[generation.sample] = generation, task

    async def _run(self, generation: SampleGeneration) -> None:
        sample = generation.sample
        try:
            held = await self._generator.generate(generation)
        except (RequestError, EnvironmentFailed) as error:
            await self._controller.report_failed_sample(sample, error)
        else:
            self.held[sample] = held
            trajectory = held.trajectory
            if generation.previously_held is None:
                self._reports.count_finished(trajectory)
            await self._report_finished(held, urgent=generation.priority == 0)
            self._generator.noise_floor.consider(trajectory, self._tasks)
        finally:
            if sample in self._generating and self._generating[sample][0] is generation:
                del self._generating[sample]


def deadline_warning(config: SchedulerConfig) -> str | None:
    """Return the warning of a run with the optional, biased deadline of samples."""
    seconds = config.sample_deadline_seconds
    if seconds is None:
        return None
    return (
        f"WARNING: scheduler.sample_deadline_seconds is {seconds:g}: samples that take longer are "
        "cut off, with finish reason `deadline`. The place depends on this machine's load, so "
        "those samples do not follow the policy to their end. asyncrl_finished_samples_total "
        "counts them. To limit tokens instead, set sampling.max_tokens."
    )
