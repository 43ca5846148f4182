"""Generation of one sample, from the command to its last token, in one or more attempts.

    command ──► attempt ──► ended (stop, length) ──► HeldSample, its reward is being computed
                 ▲  │                                │
                 │  └── interrupted                  │ verification requested
                 └───── resumed ◄────────────────────┘

Each attempt is one request to the engine. An interrupted sample resumes from the tokens that it
has. They are a prefix where they stay as they are (its slot was needed, or its KV is rebuilt), and
tokens to verify where they are too old.

The place where an attempt is interrupted must not depend on the tokens that would have followed.
Closing the engine's stream would violate that: it loses the tokens that were drawn and not reported
yet, and an engine reports early when it draws a stop token. `Engine.interrupt` instead ends the
stream with every token that was drawn (docs/decisions/0011).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from asyncrl.processes.generator.held_sample import HeldSample
from asyncrl.processes.generator.noise_floor import NoiseFloorProbe
from asyncrl.processes.generator.sample_rewards import SampleRewards
from asyncrl.processes.generator.sample_traces import AttemptTrace, SampleTraces
from asyncrl.rewards.calls import Reward
from engine.errors import EngineError
from engine.protocol import Engine, GenerateRequest, SamplingParams
from rollout.trajectory import (
    FinishReason,
    KeptTokens,
    Provenance,
    SampleId,
    Trajectory,
    TrajectoryBuilder,
)
from wire.frames import decode_tokens
from wire.messages.to_generator import PromptPayload
from wire.records import TokenCounts

_MAX_ENGINE_ABORTS = 8
"""How often an engine may end a sample without being asked to before that is an error."""

_INTERRUPT_SECONDS = 60.0
"""Longest wait for an engine to end interrupted requests."""


class PendingVerification(NamedTuple):
    """A verification that begins with the next attempt."""

    seed: int
    min_version: int


@dataclass(slots=True)
class SampleGeneration:
    """The state of one sample in generation; see the diagram of this module. It does no I/O."""

    sample: SampleId
    prompt: PromptPayload
    seed: int
    """Of the next attempts. A verification brings a seed with which none of the tokens to verify
    was drawn."""
    priority: int = 0
    """0: due. Greater: run-ahead, for that much later steps."""
    tokens_to_verify: KeptTokens | None = None
    """Earlier tokens that are verified before any new token is drawn."""
    min_version: int = -1
    """Verification was requested under weights of at least this version; -1: never."""
    previously_held: HeldSample | None = None
    """The sample as it was before this verification. Its reward holds if no token changes."""
    deadline_seconds: float | None = None
    """Longest time from its first token on (`deadlines`); None: there is none."""
    purpose: str = "train"
    """Prefix of the request ids."""
    order: int = 0
    """`GenerateRequest.order`, unless it is trained on: then its group is."""
    lineage: int = 0
    """Of the trainer that it was last rewound for."""
    builder: TrajectoryBuilder = None  # type: ignore[assignment]  # set below
    """The tokens so far."""
    pending_verification: PendingVerification | None = None
    request_id: str | None = None
    """The engine's request, while an attempt is running."""
    interrupting: bool = False
    """The running attempt was told to end."""
    has_slot: bool = False
    """The running attempt has reported a token, as engines do in the first steps of a request."""
    requested_at: float = 0.0
    """When the running attempt was requested, in monotonic seconds."""
    first_token_at: float | None = None
    """When the first token came, in monotonic seconds."""
    expired: bool = False
    """Its deadline has passed: it ends with the tokens that it has."""
    attempts: int = 0
    """Attempts since the last verification began."""
    trace: AttemptTrace | None = None
    """Of the running attempt, if its group is traced."""

    def __post_init__(self) -> None:
        self._clear_tokens()

    def _clear_tokens(self) -> None:
        prompt = decode_tokens(self.prompt.tokens)
        self.builder = TrajectoryBuilder(self.sample, self.prompt.prompt_id, prompt)

    @property
    def keeps_slot(self) -> bool:
        """Whether the running attempt has a slot that it was not told to give back."""
        return self.has_slot and not self.interrupting

    @property
    def awaits_verification(self) -> bool:
        """Whether it has tokens that are to be verified and of which none has been accepted yet."""
        return self.pending_verification is not None or (
            self.tokens_to_verify is not None and not len(self.builder)
        )

    def request_verification(self, seed: int, min_version: int) -> bool:
        """The sample is due: have its tokens verified if any is older than `min_version`.

        Returns:
            Whether the running attempt must be interrupted: because its tokens are too old, or
            because it waits for a slot with the low priority of run-ahead.
        """
        if self.min_version >= min_version:
            return False
        pending = self.pending_verification
        if pending is not None and pending.min_version >= min_version:
            return False
        was_ahead, self.priority = self.priority > 0, 0
        has_tokens = len(self.builder) > 0 or self.tokens_to_verify is not None
        if (has_tokens or was_ahead) and self._is_outdated(min_version):
            self.pending_verification = PendingVerification(seed, min_version)
            return True
        return False

    def _is_outdated(self, min_version: int) -> bool:
        """Whether its oldest token is older than this version, or it has no token."""
        oldest = self.builder.oldest_version
        return oldest is None or oldest < min_version

    def begin_pending_verification(self) -> None:
        """Before an attempt: turn the tokens into tokens to verify, if that was requested."""
        if self.pending_verification is None:
            return
        (seed, min_version), self.pending_verification = self.pending_verification, None
        if not self._is_outdated(min_version):
            return  # every token that came since the request is new enough
        self.seed, self.min_version, self.attempts = seed, min_version, 0
        self.first_token_at, self.expired = None, False  # as for a held sample
        if len(self.builder):
            self.tokens_to_verify = self.builder.kept()
            self._clear_tokens()

    def unfinished(self) -> KeptTokens | None:
        """Between two attempts: the tokens to verify if the run is resumed; None if none."""
        if len(self.builder):
            return self.builder.kept()
        kept = self.tokens_to_verify
        return kept if kept is not None and kept.lenience is None else None

    def rewind(self, version: int, lineage: int, *, versions_gone: int) -> None:
        """Between two attempts: the policies after this version are gone.

        Its tokens stay, and so does its seed: it continues where it was, with random numbers of
        places that it has not reached yet. What was verified under a policy that is gone is
        verified again when it is due, with another seed.
        """
        self.builder.forget_versions_after(version)
        if self.previously_held is not None:
            self.previously_held = self.previously_held.without_versions_after(version)
        self.pending_verification, self.min_version = None, -1
        self.priority += versions_gone
        self.lineage = lineage

    def next_request(self, sampling: SamplingParams) -> GenerateRequest:
        """The engine request of the next attempt, after the tokens that there are."""
        name = f"{self.purpose}-{self.sample}"
        if self.min_version >= 0:
            name += f"-v{self.min_version}"
        if self.lineage:
            name += f"-l{self.lineage}"
        if self.attempts:
            name += f"+{self.attempts}"
        self.attempts += 1
        request = GenerateRequest(
            request_id=name,
            cache_key=self.builder.prompt_id,
            prompt_tokens=self.builder.prompt_tokens,
            sampling=replace(sampling, seed=self.seed),
            kept=self.tokens_to_verify if not len(self.builder) else None,
            priority=self.priority,
            order=self.sample.group if self.purpose == "train" else self.order,
        )
        if len(self.builder):
            request = replace(request, prefix_tokens=self.builder.tokens())
            if self.tokens_to_verify is not None:
                rest = self.tokens_to_verify.tokens[len(self.builder) :]
                request = replace(request, draft_tokens=rest)
        return request

    def end_attempt(self, reason: FinishReason) -> FinishReason | None:
        """How the sample ends now that an attempt has ended; None if another attempt follows.

        The attempt may have drawn its stop token while a verification was requested. If no token
        is too old, that is the sample's end: another attempt would continue after the stop token.
        """
        pending = self.pending_verification
        if pending is not None and self._is_outdated(pending.min_version):
            return None
        if reason != "abort":
            return reason
        return "deadline" if self.expired and len(self.builder) else None

    def known_reward(self, trajectory: Trajectory) -> asyncio.Task[Reward] | None:
        """The reward of the sample before its verification, if that changed no token."""
        before = self.previously_held
        if before is None or not np.array_equal(before.trajectory.tokens, trajectory.tokens):
            return None
        return before.reward

    def verification_counts(self) -> TokenCounts:
        """How many of the tokens to verify were accepted and rejected; 0 if none was judged."""
        if self.tokens_to_verify is None or not len(self.builder):
            return TokenCounts()
        accepted = self.builder.count(Provenance.VERIFIED)
        return TokenCounts(verified=accepted, rejected=len(self.tokens_to_verify) - accepted)


class SampleGenerator:
    """Generates samples with an engine, in as many attempts as each needs.

    Args:
        engine: draws the tokens.
        rewards: computes the rewards of finished samples.
        sampling: of every request; the seed is the sample's.
        noise_floor_every: see `noise_floor`; None: it is not measured.
        traces: of training samples; None: nothing is traced.
    """

    def __init__(
        self,
        engine: Engine,
        rewards: SampleRewards,
        sampling: SamplingParams,
        *,
        noise_floor_every: int | None = None,
        traces: SampleTraces | None = None,
    ) -> None:
        self._engine = engine
        self._traces = traces
        self.sampling = sampling
        """Of every request; the seed is the sample's."""
        self._attempts_allowed = asyncio.Event()
        self._attempts_allowed.set()
        self._engine_unpaused = asyncio.Event()
        self._engine_unpaused.set()
        self._attempts = 0
        self._no_attempt = asyncio.Event()
        self._no_attempt.set()
        self.rewards = rewards
        self.noise_floor = NoiseFloorProbe(engine, sampling, noise_floor_every)
        self._verified = TokenCounts()
        self._outside_top_k = 0

    @property
    def tokens(self) -> TokenCounts:
        """What only the generator can count: `verified`, `rejected` and `outside_top_k`."""
        return self._verified + TokenCounts(outside_top_k=self._outside_top_k)

    def hold_attempts(self) -> None:
        """Start no attempt until `allow_attempts`."""
        self._attempts_allowed.clear()

    def allow_attempts(self) -> None:
        """Undo `hold_attempts`."""
        self._attempts_allowed.set()

    async def attempts_ended(self) -> None:
        """Wait until no attempt at a training sample is running. Interrupt them all before.

        Raises:
            EngineError: the engine did not end its requests.
        """
        try:
            async with asyncio.timeout(_INTERRUPT_SECONDS):
                await self._no_attempt.wait()
        except TimeoutError as error:
            raise EngineError(
                f"{self._attempts} interrupted requests did not end within {_INTERRUPT_SECONDS} s"
            ) from error

    async def _attempt_is_allowed(self, generation: SampleGeneration) -> None:
        """Wait until the next attempt may begin."""
        while True:
            while not self._attempts_allowed.is_set():
                await self._attempts_allowed.wait()
            if not generation.awaits_verification or self._engine_unpaused.is_set():
                return
            await self._engine_unpaused.wait()

    def set_engine_paused(self, paused: bool) -> None:
        """Tell whether the engine is paused: a paused engine may be unable to verify."""
        if paused:
            self._engine_unpaused.clear()
            self.noise_floor.hold()
        else:
            self._engine_unpaused.set()
            self.noise_floor.allow()

    def interrupt(self, generation: SampleGeneration) -> None:
        """End the running attempt, if there is one; `end_attempt` says what follows."""
        if generation.request_id is not None and not generation.interrupting:
            generation.interrupting = True
            self._engine.interrupt(generation.request_id)
            if generation.trace is not None:
                generation.trace.interrupt()

    async def generate(self, generation: SampleGeneration) -> HeldSample:
        """Generate all tokens of a sample; its reward is computed after this returns.

        Raises:
            RequestError: the engine cannot serve the sample.
            EngineError: the engine failed or was closed.
        """
        engine_aborts = 0
        while True:
            generation.begin_pending_verification()
            await self._attempt_is_allowed(generation)
            reason = await self._attempt(generation)
            engine_aborts += reason == "abort" and not generation.interrupting
            if engine_aborts > _MAX_ENGINE_ABORTS:
                raise EngineError(
                    f"sample {generation.sample}: the engine aborted its request {engine_aborts} "
                    "times without being asked to"
                )
            end = generation.end_attempt(reason)
            if end is not None:
                trajectory = generation.builder.finish(end)
                reward = generation.known_reward(trajectory)
                if reward is None:
                    reward = self.rewards.start(generation.prompt, trajectory)
                    if self._traces is not None and generation.purpose == "train":
                        self._traces.rewarding(generation.sample, reward)
                seconds = generation.deadline_seconds
                return HeldSample(trajectory, generation.prompt, reward, seconds)

    async def _attempt(self, generation: SampleGeneration) -> FinishReason:
        """Serve one request to its end and append its tokens as they come."""
        generation.begin_pending_verification()  # one may have been requested during the waits
        request = generation.next_request(self.sampling)
        generation.request_id, generation.interrupting = request.request_id, False
        generation.requested_at = time.monotonic()
        is_training = generation.purpose == "train"
        self._attempts += is_training
        if is_training:
            self._no_attempt.clear()
            if self._traces is not None:
                generation.trace = self._traces.attempt(generation.sample, request)
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
