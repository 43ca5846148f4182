"""Runs the attempts of samples: an engine's requests, an environment's answers, then a reward."""

import asyncio
import time
from dataclasses import dataclass

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import Engine, SamplingParams
from asyncrl.generator.noise_floor import NoiseFloorProbe
from asyncrl.generator.sample_rewards import SampleRewards
from asyncrl.generator.sample_state import HeldSample, SampleGeneration, session_of
from asyncrl.generator.sample_traces import SampleTraces
from asyncrl.generator.turns.conversation import actions_of
from asyncrl.generator.turns.environment_turns import Episodes, StartOver, or_deadline
from asyncrl.rollout.trajectory import FinishReason
from asyncrl.wire.records.step import EnvironmentCounts, TokenCounts

_MAX_ENGINE_ABORTS = 8
"""Unrequested aborts by the engine per sample, beyond which it is an error."""
_INTERRUPT_SECONDS = 60.0


@dataclass(eq=False)
class SampleGenerator:
    """Generates samples with an engine, in as many attempts as each needs.

    `sampling` is that of every request, except the seed, which is the sample's; held-out samples
    may have another, of the same length. Without `episodes` a sample is one turn.
    `noise_floor_every` is None if that is not measured.
    """

    _engine: Engine
    rewards: SampleRewards
    sampling: SamplingParams
    held_out_sampling: SamplingParams | None = None
    noise_floor_every: int | None = None
    traces: SampleTraces | None = None
    episodes: Episodes | None = None

    def __post_init__(self) -> None:
        self.attempts_allowed = _event_that_is_set()
        """No attempt starts while it is not set."""
        self._engine_unpaused = _event_that_is_set()
        self._attempts = 0
        self._no_attempt = _event_that_is_set()
        self.noise_floor = NoiseFloorProbe(self._engine, self.sampling, self.noise_floor_every)
        self._verified = TokenCounts()
        self._outside_top_k = 0
        self._held_out: dict[int, SampleGeneration] = {}

    @property
    def tokens(self) -> TokenCounts:
        """Counts that only the generator has: `verified`, `rejected` and `outside_top_k`."""
        return self._verified + TokenCounts(outside_top_k=self._outside_top_k)

    @property
    def environment(self) -> EnvironmentCounts:
        """Counts of environments."""
        return EnvironmentCounts() if self.episodes is None else self.episodes.counts

    @property
    def held_out_in_environments(self) -> int:
        """Held-out samples that wait for their environment before they need a slot."""
        return sum(one.waits_for_environment for one in self._held_out.values())

    async def attempts_ended(self) -> None:
        """Interrupt all attempts at training samples and wait for their end. Raises EngineError."""
        try:
            async with asyncio.timeout(_INTERRUPT_SECONDS):
                await self._no_attempt.wait()
        except TimeoutError as error:
            raise EngineError(
                f"{self._attempts} interrupted requests did not end within {_INTERRUPT_SECONDS} s"
            ) from error

    async def _attempt_is_allowed(self, generation: SampleGeneration) -> None:
        while True:
            while not self.attempts_allowed.is_set():
                await self.attempts_allowed.wait()
            if not generation.awaits_verification or self._engine_unpaused.is_set():
                return
            await self._engine_unpaused.wait()

    def set_engine_paused(self, paused: bool) -> None:
        """Set whether the engine is paused: a paused engine may be unable to verify."""
        if paused:
            self._engine_unpaused.clear()
            self.noise_floor.hold()
        else:
            self._engine_unpaused.set()
            self.noise_floor.allow()

    def interrupt(self, generation: SampleGeneration) -> None:
        """End the running attempt, if there is one; `end_attempt` decides what follows."""
        if generation.request_id is not None and not generation.interrupting:
            generation.interrupting = True
            self._engine.interrupt(generation.request_id)
            if generation.trace is not None:
                generation.trace.interrupt()
        answering = generation.answering
        if answering is not None and (generation.expired or generation.will_start_over):
            answering.cancel()  # its answer is not used

    async def generate(self, generation: SampleGeneration) -> HeldSample:
        """Generate all tokens of a sample; its reward is computed after this returns.

        Raises RequestError if the engine cannot serve the sample; EngineError if it failed or was
        closed; EnvironmentFailed if `rewards.on_error` is `stop`.
        """
        if generation.purpose == "eval":
            self._held_out[id(generation)] = generation
        try:
            return await self._generate(generation)
        except BaseException:
            if generation.episode is not None:
                generation.episode.close()
            raise
        finally:
            self._held_out.pop(id(generation), None)
            _end_session(self._engine, generation)

    async def _generate(self, generation: SampleGeneration) -> HeldSample:
        engine_aborts = 0
        await self._begin(generation)
        while True:
            await self._open(generation)
            generation.begin_pending_verification()
            await self._attempt_is_allowed(generation)
            generation.begin_pending_verification()  # one may have been requested by now
            if _must_open(generation):
                continue  # it starts over
            if generation.is_overdue:
                return self._finish(generation, "deadline")
            reason = await self._attempt(generation)
            engine_aborts += reason == "abort" and not generation.interrupting
            if engine_aborts > _MAX_ENGINE_ABORTS:
                raise EngineError(
                    f"sample {generation.sample}: the engine aborted its request {engine_aborts} "
                    "times without a request to do so"
                )
            end = generation.end_attempt(reason)
            if end is not None and self.episodes is not None:
                end = await self._answer(self.episodes, generation, end)
            if end is not None:
                return self._finish(generation, end)

    def _finish(self, generation: SampleGeneration, end: FinishReason) -> HeldSample:
        trajectory = generation.builder.finish(end)
        episode = generation.episode
        if episode is not None:  # a turn that was cut off is not given to it
            episode.keep_answered(actions_of(trajectory.tokens, ~trajectory.trained)[0])
        reward = generation.known_reward(trajectory)
        if reward is None:
            reward = self.rewards.start(generation.prompt, trajectory, episode)
            if self.traces is not None and generation.purpose == "train":
                self.traces.rewarding(generation.sample, reward)
        if episode is not None:
            episode.finish()
        limit = generation.deadline_seconds
        return HeldSample(trajectory, generation.prompt, reward, limit, episode)

    async def _begin(self, generation: SampleGeneration) -> None:
        """Open the environment; drop tokens to verify if it could not go back to any turn.

        No token is looked at. Answers from before a resume are known only if they are repeated.
        """
        if self.episodes is None:
            return
        is_new = generation.episode is None
        if is_new:
            generation.episode = self.episodes.new(generation)
            await self._open(generation)
        episode = generation.episode
        if episode is None or generation.tokens_to_verify is None:
            return
        if is_new and episode.failed:
            generation.tokens_to_verify = None  # they followed its earlier answers
        elif not (episode.traits.replay == "deterministic" if is_new else episode.goes_back):
            generation.start_over()

    async def _open(self, generation: SampleGeneration) -> None:
        if self.episodes is None or not _must_open(generation):
            return
        _end_session(self._engine, generation)
        generation.opening = True
        try:
            await self.episodes.begin(generation)
        finally:
            generation.opening = False
        generation.clear_tokens()

    async def _answer(
        self, episodes: Episodes, generation: SampleGeneration, end: FinishReason | None
    ) -> FinishReason | None:
        """Let the environment answer the ended turn; return how the sample ends, if it does."""
        cut_off = None if generation.turn_has_ended(end, self.sampling.max_tokens) else end
        episode = generation.episode
        if cut_off is not None and (
            episode is None or not episode.lacks_answers(generation.builder)
        ):
            return cut_off
        generation.answering = asyncio.create_task(episodes.answer(generation, cut_off))
        try:
            end = await or_deadline(generation.answering)
        except StartOver:
            generation.start_over()
            return None
        finally:
            generation.answering = None
        if end == "deadline" and generation.episode is not None:
            generation.episode.close()  # it is still answering
        return None if end is None else generation.end_attempt(end)

    async def _attempt(self, generation: SampleGeneration) -> FinishReason:
        is_held_out = generation.purpose == "eval"
        sampling = (self.held_out_sampling if is_held_out else None) or self.sampling
        request = generation.next_request(sampling)
        generation.request_id, generation.interrupting = request.request_id, False
        generation.requested_at = time.monotonic()
        is_training = generation.purpose == "train"
        self._attempts += is_training
        if is_training:
            self._no_attempt.clear()
            if self.traces is not None:
                generation.trace = self.traces.attempt(generation.sample, request)
        try:
            async for chunk in self._engine.generate(request):
                if len(chunk.tokens):
                    generation.has_slot = True
                    if generation.first_token_at is None:
                        generation.first_token_at = time.monotonic()
                self._outside_top_k += chunk.outside_top_k()
                chunk.append_to(generation.builder)
                if generation.trace is not None:
                    generation.trace.add(chunk)
                if chunk.finish_reason is not None:
                    return chunk.finish_reason
        finally:
            generation.request_id, generation.has_slot = None, False
            self._attempts -= is_training
            if not self._attempts:
                self._no_attempt.set()
            if generation.trace is not None:
                generation.trace.end()
                generation.trace = None
            if request.kept is not None:
                self._verified += generation.verification_counts()
        raise EngineError(
            f"request {request.request_id}: the engine's stream ended without a finish reason"
        )


def _event_that_is_set() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def _must_open(generation: SampleGeneration) -> bool:
    episode = generation.episode
    return episode is not None and not episode.opened and not episode.failed


def _end_session(engine: Engine, generation: SampleGeneration) -> None:
    if session := session_of(generation):
        engine.end_session(session)
