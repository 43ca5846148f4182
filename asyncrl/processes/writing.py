"""A sample that is being written, from its order to its last token. State only, no engine.

    order ──► stretch ──► ended (stop, length) ──► HeldSample, its reward on the way
                 ▲  │                                │
                 │  └── interrupted                  │ verification ordered
                 └───── goes on ◄────────────────────┘

Each stretch is one request to the engine. An interrupted sample goes on from what it has: as a
prefix, where its tokens stay as they are (room was needed, or its KV is rebuilt); as kept tokens,
where they are to be verified first.

Where a stretch is cut must not depend on what would have come behind the cut. So nothing is cut by
closing the stream, which would lose what the engine has drawn and not reported (a report comes
early when a stop token is drawn): `Engine.interrupt` ends it with all that was drawn.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import numpy as np

from engine.protocol import GenerateRequest, SamplingParams
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

_WHOLE_AT_ONCE = 8
"""About a group: the trainer waits for the first one."""


@dataclass(frozen=True, slots=True)
class HeldSample:
    """A finished sample that the trainer does not have yet."""

    trajectory: Trajectory
    prompt: PromptPayload
    reward: asyncio.Task[float]
    """It has left its slot already while this is computed."""


@dataclass(slots=True)
class Writing:
    """One sample on its way; see the module's picture."""

    sample: SampleId
    prompt: PromptPayload
    seed: int
    """Of the stretches to come; a verification brings one that drew none of the kept tokens."""
    priority: int = 0
    kept: KeptTokens | None = None
    """Earlier tokens that this writing began with; verified before anything else is drawn."""
    min_version: int = -1
    """What was kept is verified under weights of at least this version."""
    rewarded: HeldSample | None = None
    """The sample as it was finished before: if all of it is accepted, its reward still holds."""
    purpose: str = "train"
    builder: TrajectoryBuilder = None  # type: ignore[assignment]  # made below
    ordered: tuple[int, int] | None = None
    """(seed, least version) of a verification that begins with the next stretch."""
    request_id: str | None = None
    """What the engine serves of it now."""
    interrupting: bool = False
    """The stretch in hand was asked to end."""
    holds: bool = False
    """The stretch in hand has a slot: it has reported a token. (Engines report the first at once,
    so one that has a slot and no token yet is in its first step.)"""
    began: float | None = None
    """When its first token came, on the caller's clock."""
    expired: bool = False
    """It is past its deadline: it ends with what it has."""
    stretches: int = 0

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        tokens = decode_tokens(self.prompt.tokens)
        self.builder = TrajectoryBuilder(self.sample, self.prompt.prompt_id, tokens)

    @property
    def verifying(self) -> bool:
        """Whether there are kept tokens that no policy has judged yet."""
        return self.ordered is not None or (self.kept is not None and not len(self.builder))

    def order(self, seed: int, min_version: int) -> bool:
        """It is due: have what there is of it verified, if any of that is too old.

        Returns:
            Whether the stretch in hand must be interrupted for that, or because it waits for a
            slot as run-ahead does.
        """
        if self.min_version >= min_version:
            return False
        if self.ordered is not None and self.ordered[1] >= min_version:
            return False
        was_ahead, self.priority = self.priority > 0, 0
        begun = len(self.builder) > 0 or self.kept is not None
        if (begun or was_ahead) and self._outdated(min_version):
            self.ordered = (seed, min_version)
            return True
        return False

    def _outdated(self, min_version: int) -> bool:
        """Whether it has older tokens, or none yet."""
        oldest = self.builder.oldest_version
        return oldest is None or oldest < min_version

    def turn(self) -> None:
        """Before a stretch: begin the verification that was ordered, if one was."""
        if self.ordered is None:
            return
        (seed, min_version), self.ordered = self.ordered, None
        if not self._outdated(min_version):
            return  # all that came is young enough
        self.seed, self.min_version, self.stretches = seed, min_version, 0
        self.began, self.expired = None, False  # as for one that was finished and held
        if len(self.builder):
            self.kept = self.builder.kept()
            self._begin()

    def request(self, sampling: SamplingParams) -> GenerateRequest:
        """The next stretch: kept tokens first, or on from the tokens that there are."""
        name = f"{self.purpose}-{self.sample}"
        if self.min_version >= 0:
            name += f"-v{self.min_version}"
        if self.stretches:
            name += f"+{self.stretches}"
        self.stretches += 1
        request = GenerateRequest(
            request_id=name,
            cache_key=self.builder.prompt_id,
            prompt_tokens=self.builder.prompt_tokens,
            sampling=replace(sampling, seed=self.seed),
            kept=self.kept if not len(self.builder) else None,
            priority=self.priority,
        )
        if len(self.builder):
            request = replace(request, prefix_tokens=self.builder.tokens())
            if self.kept is not None:
                request = replace(request, draft_tokens=self.kept.tokens[len(self.builder) :])
        return request

    def finish(self, reason: FinishReason) -> FinishReason | None:
        """What the end of a stretch means for the sample: its end, or None if it goes on.

        It may have ended as its verification was ordered. If nothing of it is too old that is its
        end: going on would write behind its stop token.
        """
        if self.ordered is not None and self._outdated(self.ordered[1]):
            return None
        if reason != "abort":
            return reason
        return "deadline" if self.expired and len(self.builder) else None

    def known_reward(self, trajectory: Trajectory) -> asyncio.Task[float] | None:
        """The reward that it had before, if verification left it as it was."""
        before = self.rewarded
        if before is None or not np.array_equal(before.trajectory.tokens, trajectory.tokens):
            return None
        return before.reward

    def verified(self) -> tuple[int, int]:
        """(accepted, rejected) kept tokens, of what this writing began with and has judged."""
        if self.kept is None or not len(self.builder):
            return 0, 0
        accepted = self.builder.count(Provenance.VERIFIED)
        return accepted, len(self.kept) - accepted


def excess(writings: list[Writing], *, slots: int, kv_full: bool = False) -> list[Writing]:
    """Run-ahead that must give its slot to due samples that have none; the most ahead first.

    Held samples that are to be verified mostly need one step each, so of large engines they are
    counted as a quarter of the slots at most, and take turns in those.

    Args:
        writings: all of a generator.
        slots: of its engine.
        kv_full: slots do not help: it is KV space that due samples wait for.
    """
    due = [w for w in writings if w.priority == 0 and not w.holds]
    if not due:
        return []
    whole = sum(w.rewarded is not None for w in due)
    wanted = len(due) - whole + min(whole, max(_WHOLE_AT_ONCE, slots // 4))
    free = 0 if kv_full else slots - sum(w.holds for w in writings)
    ahead = [w for w in writings if w.priority > 0 and w.holds]
    ahead.sort(key=lambda w: (w.priority, w.sample), reverse=True)
    return ahead[: max(0, wanted - free)]
