"""Generation of one sample, from the command to its last token, in one or more attempts.

    command ──► attempt ──► ended (stop, length) ──► HeldSample, its reward is being computed
                 ▲  │                                │
                 │  └── interrupted                  │ verification requested
                 └───── resumed ◄────────────────────┘

With an environment, an attempt that ends by `stop` ends a turn. The environment answers while the
sample has no slot, and the next attempt follows its answer (`turns.environment_turns`).

Each attempt is one request to the engine. An interrupted sample resumes from its tokens. They are a
prefix if they stay valid (its slot was needed, or its KV is rebuilt), and tokens to verify if they
are too old.

The place of an interruption must not depend on the tokens that would have followed. Closing the
engine's stream loses drawn tokens, and an engine reports early when it draws a stop token. So
`Engine.interrupt` ends the stream with every drawn token (docs/decisions/0011).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.generator.sample_traces import AttemptTrace
from asyncrl.generator.turns.conversation import Episode
from asyncrl.rewards.calls import Reward
from asyncrl.rollout.contexts import Verification, joined, seed_of_context
from asyncrl.rollout.trajectory import (
    FinishReason,
    KeptTokens,
    SampleId,
    Trajectory,
    TrajectoryBuilder,
    VerifiableTrajectory,
)
from asyncrl.wire.messages.data import decode_tokens
from asyncrl.wire.messages.to_generator import PromptPayload
from asyncrl.wire.records.step import TokenCounts


@dataclass(frozen=True, slots=True)
class HeldSample:
    """A finished sample that was not delivered yet."""

    trajectory: VerifiableTrajectory
    prompt: PromptPayload
    reward: asyncio.Task[Reward]
    deadline_seconds: float | None = None
    episode: Episode | None = None

    def close(self) -> None:
        """End its environment: it will not be verified any more."""
        if self.episode is not None:
            self.episode.close()

    def without_versions_after(self, version: int) -> HeldSample:
        """Return the same sample without later versions, whose policies are gone."""
        trajectory = self.trajectory.without_versions_after(version)
        return self if trajectory is self.trajectory else replace(self, trajectory=trajectory)


class PendingVerification(NamedTuple):
    """A verification that begins with the next attempt."""

    seed: int
    min_version: int


@dataclass(slots=True)
class SampleGeneration:
    """The state of one sample in generation; see the module's diagram. It does no I/O."""

    sample: SampleId
    prompt: PromptPayload
    seed: int
    """Seed of the next attempts. A verification brings a seed with which none of its tokens was
    drawn."""
    priority: int = 0
    """0: due. Greater: run-ahead, for that much later steps."""
    tokens_to_verify: KeptTokens | None = None
    min_version: int = -1
    """Verification was requested under weights of at least this version; -1: never."""
    previously_held: HeldSample | None = None
    """The sample before this verification. Its reward holds if no token changes."""
    deadline_seconds: float | None = None
    purpose: str = "train"
    order: int = 0
    """`GenerateRequest.order` of an untrained sample; a trained one has its group's."""
    lineage: int = 0
    """Lineage of the trainer for which it was last rewound."""
    builder: TrajectoryBuilder = None  # type: ignore[assignment]  # set below
    pending_verification: PendingVerification | None = None
    request_id: str | None = None
    interrupting: bool = False
    has_slot: bool = False
    """True once the running attempt has reported a token, which engines do in a request's first
    steps."""
    requested_at: float = 0.0
    """Monotonic seconds, as `first_token_at`."""
    first_token_at: float | None = None
    expired: bool = False
    """True if its deadline has passed: it ends with its current tokens."""
    attempts: int = 0
    trace: AttemptTrace | None = None
    environment_seed: int | None = None
    episode: Episode | None = None
    answering: asyncio.Task[FinishReason | None] | None = None
    opening: bool = False

    def __post_init__(self) -> None:
        if self.environment_seed is None:
            self.environment_seed = self.seed
        self.clear_tokens()

    def clear_tokens(self) -> None:
        """Begin without tokens, after its environment's prompt if there is one."""
        prompt = decode_tokens(self.prompt.tokens)
        if self.episode is not None and len(self.episode.prompt):
            prompt = self.episode.prompt
        self.builder = TrajectoryBuilder(self.sample, self.prompt.prompt_id, prompt)

    @property
    def waits_for_environment(self) -> bool:
        """True if it needs no slot now, because its environment has to answer first."""
        return self.answering is not None or self.opening

    @property
    def will_start_over(self) -> bool:
        """True if the requested verification drops all tokens, whatever they are.

        This applies only to environments that can never go back: asking again one that can would
        prefer answers that come quickly (docs/decisions/0087).
        """
        pending, episode = self.pending_verification, self.episode
        if pending is None or episode is None:
            return False
        return not episode.traits.goes_back and self._is_outdated(pending.min_version)

    @property
    def is_overdue(self) -> bool:
        """True if its deadline passed between two attempts: it ends with its current tokens."""
        return self.expired and len(self.builder) > 0 and not self.awaits_verification

    def start_over(self) -> None:
        """Drop all tokens, to be generated anew with another session of the environment.

        The seed stays. A verification brings another one; what was lost with a process is redrawn
        with the same numbers, since losses would otherwise redraw long samples more often than
        short ones (docs/decisions/0082).
        """
        self.tokens_to_verify = self.previously_held = None
        self.first_token_at, self.expired = None, False
        if self.episode is not None:
            self.episode.begin_again()
        self.clear_tokens()

    @property
    def keeps_slot(self) -> bool:
        """True if the running attempt has a slot and was not interrupted."""
        return self.has_slot and not self.interrupting

    @property
    def awaits_verification(self) -> bool:
        """True if its next request verifies tokens."""
        verification = self._verification
        return self.pending_verification is not None or (
            verification is not None and verification.to_verify_now() is not None
        )

    def request_verification(self, seed: int, min_version: int) -> bool:
        """Verify the tokens of a due sample if any is older than `min_version`.

        Returns True if the running attempt must be interrupted: its tokens are too old, or it waits
        for a slot with the low priority of run-ahead.
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
        oldest = self.builder.oldest_version
        return oldest is None or oldest < min_version

    def begin_pending_verification(self) -> None:
        """Turn the tokens into tokens to verify before an attempt, if that was requested."""
        if self.pending_verification is None:
            return
        (seed, min_version), self.pending_verification = self.pending_verification, None
        if not self._is_outdated(min_version):
            return  # every token that came since the request is new enough
        self.seed, self.min_version, self.attempts = seed, min_version, 0
        self.first_token_at, self.expired = None, False  # as for a held sample
        if not len(self.builder) and self.tokens_to_verify is None:
            return
        if self.episode is not None and not self.episode.goes_back:
            self.start_over()  # whatever its tokens are
        elif len(self.builder):
            self.tokens_to_verify = self._all_kept()
            self.clear_tokens()

    def unfinished(self) -> KeptTokens | None:
        """Return the tokens to verify if the run is resumed. Call it between two attempts."""
        if len(self.builder):
            return self._all_kept()
        kept = self.tokens_to_verify
        return kept if kept is not None and kept.lenience is None else None

    def _all_kept(self) -> KeptTokens:
        """Return the tokens so far, and those of contexts that are still to be verified."""
        kept, verification = self.builder.kept(), self._verification
        rest = None if verification is None else verification.unjudged()
        return kept if rest is None else joined(kept, rest)

    @property
    def _verification(self) -> Verification | None:
        kept = self.tokens_to_verify
        return None if kept is None else Verification(kept, self.builder)

    def rewind(self, version: int, lineage: int, *, versions_gone: int) -> None:
        """Forget the policies after this version. Call it between two attempts.

        Its tokens and seed stay: it continues with random numbers of positions that it has not
        reached yet. Tokens verified under a forgotten policy are verified again when it is due,
        with another seed.
        """
        self.builder.forget_versions_after(version)
        if self.previously_held is not None:
            self.previously_held = self.previously_held.without_versions_after(version)
        self.pending_verification, self.min_version = None, -1
        self.priority += versions_gone
        self.lineage = lineage

    def next_request(self, sampling: SamplingParams) -> GenerateRequest:
        """Build the engine request of the next attempt, after the current tokens."""
        name = f"{self.purpose}-{self.sample}"
        if self.min_version >= 0:
            name += f"-v{self.min_version}"
        if self.lineage:
            name += f"-l{self.lineage}"
        if self.attempts:
            name += f"+{self.attempts}"
        self.attempts += 1
        builder, verification = self.builder, self._verification
        seed = seed_of_context(self.seed, len(builder.contexts))
        room = self._room(sampling.max_tokens)
        turn_limit = None if self.episode is None else self.episode.max_turn_tokens
        request = GenerateRequest(
            request_id=name,
            cache_key=builder.prompt_id,
            prompt_tokens=builder.context_prompt,
            sampling=replace(sampling, seed=seed, max_tokens=room, max_turn_tokens=turn_limit),
            kept=None if verification is None else verification.to_verify_now(),
            priority=self.priority,
            order=self.sample.group if self.purpose == "train" else self.order,
            session=session_of(self),
        )
        if len(builder) > (start := builder.context_start):
            turn = max(0, builder.turn_start - start)
            request = replace(request, prefix_tokens=builder.tokens()[start:], turn_start=turn)
            if verification is not None:
                request = replace(request, draft_tokens=verification.draft())
        return request

    def _room(self, max_tokens: int) -> int:
        """Return the length limit of the context's response: a longer prompt leaves less."""
        begun = len(self.builder) - self.builder.context_start
        return max(1, max_tokens - self.builder.used_tokens + begun)

    def turn_has_ended(self, end: FinishReason | None, max_tokens: int) -> bool:
        """Return True if an attempt's end is a turn's: a stop, or the limit of this turn alone."""
        if end != "length":
            return end == "stop"
        builder = self.builder
        return len(builder) - builder.context_start < self._room(max_tokens)

    def end_attempt(self, reason: FinishReason) -> FinishReason | None:
        """Return how the sample ends with this attempt; None if another attempt follows.

        The attempt may have drawn its stop token while a verification was requested. If no token is
        too old, that is the sample's end: another attempt would continue after the stop token.
        """
        pending = self.pending_verification
        if pending is not None and self._is_outdated(pending.min_version):
            return None
        if reason != "abort":
            verification = self._verification
            return None if verification is not None and verification.begin_next() else reason
        return "deadline" if self.expired and len(self.builder) else None

    def known_reward(self, trajectory: Trajectory) -> asyncio.Task[Reward] | None:
        """Return the reward of the sample before its verification, if that changed nothing.

        A sample that a deadline ended while its environment was answering may now end otherwise,
        with the same tokens and another reward.
        """
        before = self.previously_held
        if before is None or before.trajectory.finish_reason != trajectory.finish_reason:
            return None
        same = np.array_equal(before.trajectory.tokens, trajectory.tokens)
        return before.reward if same else None

    def verification_counts(self) -> TokenCounts:
        """Count the tokens that a request verified and rejected; 0 if none was judged."""
        verification = self._verification
        if verification is None or len(self.builder) == self.builder.context_start:
            return TokenCounts()
        accepted, rejected = verification.judged()
        return TokenCounts(verified=accepted, rejected=rejected)


def session_of(generation: SampleGeneration) -> str:
    """Return `GenerateRequest.session` of its turns; "" if it has only one."""
    return "" if generation.episode is None else f"{generation.purpose}-{generation.sample}"
