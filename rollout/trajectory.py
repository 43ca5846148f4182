"""The trajectory: one sample of one prompt, with the origin of every token.

A trajectory is finished and immutable; an engine's chunks are appended to a `TrajectoryBuilder`.

Example:
    >>> import numpy as np
    >>> prompt = np.array([5, 6], np.int32)
    >>> builder = TrajectoryBuilder(SampleId(group=3, sample=0), "add-17", prompt)
    >>> builder.append(
    ...     tokens=np.array([7, 8], np.int32),
    ...     logprobs=np.array([-0.1, -0.2], np.float32),
    ...     topk_ids=np.array([[7], [8]], np.int32),
    ...     topk_logprobs=np.array([[-0.1], [-0.2]], np.float32),
    ...     noise_seeds=np.array([17, 17], np.uint64),
    ...     provenance=np.array([Provenance.SAMPLED, Provenance.DRAFTED], np.uint8),
    ...     policy_version=4,
    ... )
    >>> trajectory = builder.finish("stop")
    >>> trajectory.segments
    (Segment(policy_version=4, start=0, end=2),)
    >>> trajectory.staleness(trained_by=6).tolist()
    [2, 2]
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Literal, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
ByteArray = NDArray[np.uint8]
BoolArray = NDArray[np.bool_]
SeedArray = NDArray[np.uint64]

UNKNOWN_VERSION = -1
"""Marks tokens drawn by a policy that no longer exists, because its trainer was lost. They are too
old for every step, so they are verified before they are used."""

ScalarT = TypeVar("ScalarT", bound=np.generic)

FinishReason = Literal["stop", "length", "abort", "deadline"]
"""`stop`: the last token is a stop token. `length`: the token limit was reached. `abort`: it was
aborted. `deadline`: its time was up (scheduler.sample_deadline_seconds)."""
CUT_OFF: tuple[FinishReason, ...] = ("length", "deadline")
"""Finish reasons of truncated samples."""


class SampleId(msgspec.Struct, frozen=True, order=True):
    """Identity of a sample, unique in a run; acknowledgements refer to it."""

    group: int
    """Index of the group in the order in which the run visits its prompts; never reused."""
    sample: int
    """Index of the sample in its group, from 0 to group_size - 1."""

    def __str__(self) -> str:
        return f"{self.group}.{self.sample}"


class Provenance(IntEnum):
    """Origin of a token."""

    SAMPLED = 0
    """Drawn without a draft for its position, or after the draft was rejected."""
    DRAFTED = 1
    """Drafted by the cache and accepted under the policy version of its segment."""
    VERIFIED = 2
    """Drawn under an older policy version and accepted again under that of its segment."""
    OBSERVED = 3
    """Not drawn by a policy: an environment's answer, and the chat template's tokens around it. It
    is conditioned on, never trained on or judged. Its log-probability is 0."""


class Segment(msgspec.Struct, frozen=True):
    """Response tokens `[start, end)` that follow one policy version."""

    policy_version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Response tokens drawn earlier, with the record of each draw.

    They may be verified if they were *never trained on* (docs/exactness.md). L is the number of
    tokens, K the stored top-K.
    """

    tokens: IntArray
    logprobs: FloatArray
    """`[L]` log-probability with which each was drawn (after temperature and truncation)."""
    topk_ids: IntArray
    """`[L, K]` the list of ids that was fixed before the draw, padded with -1. A verified token
    keeps the list that it was first drawn with."""
    topk_logprobs: FloatArray
    """`[L, K]` their log-probabilities in that distribution, padded with -inf."""
    noise_seeds: SeedArray
    """`[L]` seeds of the noise that chose among the tokens outside the list."""
    observed: BoolArray = field(default_factory=lambda: np.empty(0, np.bool_))
    """`[L]` True if a token was observed (`Provenance.OBSERVED`); left out: none was."""
    lenience: float | None = None
    """None: the exact rule. A number l: SPEC-RL's rule, which accepts with min(1, l p/q) and draws
    no residual. That rule is biased; see docs/exactness.md."""
    contexts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.observed):
            object.__setattr__(self, "observed", np.zeros(len(self.tokens), np.bool_))

    def __len__(self) -> int:
        return len(self.tokens)

    def after(self, count: int) -> KeptTokens:
        """Return all but the first `count` tokens."""
        return self.part(count, len(self))

    def part(self, start: int, end: int) -> KeptTokens:
        """Return the tokens `[start, end)`, as a separate context if one begins before `start`."""
        arrays = [one.name for one in fields(self) if one.name not in ("lenience", "contexts")]
        inside = tuple(place - start for place in self.contexts if start < place < end)
        return replace(
            self, contexts=inside, **{name: getattr(self, name)[start:end] for name in arrays}
        )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished sample of L tokens, with everything that training needs, read-only."""

    id: SampleId
    prompt_id: str
    """Identity of the prompt across epochs; the key of its tree in the cache."""
    prompt_tokens: IntArray
    tokens: IntArray
    """`[L]` response token ids, the stop token included."""
    behaviour_logprobs: FloatArray
    """`[L]` log-probability (after temperature and truncation) with which each token was drawn."""
    provenance: ByteArray
    """`[L]` a `Provenance` value per token."""
    segments: tuple[Segment, ...]
    """Cover `[0, L)` in order and without gaps; neighbours differ in version."""
    finish_reason: FinishReason
    contexts: tuple[int, ...] = field(default=(), kw_only=True)
    """Places in `[0, L)` at which the model's context begins anew, ascending. The observed tokens
    from there on are the whole prompt of what follows (`asyncrl.rollout.contexts`)."""

    def versions(self) -> IntArray:
        """Return `[L]` policy version that each token's distribution follows."""
        out = np.empty(len(self.tokens), np.int32)
        for segment in self.segments:
            out[segment.start : segment.end] = segment.policy_version
        return out

    def without_versions_after(self, version: int) -> Self:
        """Return the same tokens, now that the policies of later versions are gone.

        If any token is of such a policy, all count as of an unknown one, and are verified together.
        """
        if self.segments[-1].policy_version <= version:
            return self
        return replace(self, segments=(Segment(UNKNOWN_VERSION, 0, len(self.tokens)),))

    @property
    def trained(self) -> BoolArray:
        """`[L]` the tokens that the policy has drawn: all but the observed ones."""
        mask: BoolArray = self.provenance != Provenance.OBSERVED
        return mask

    @property
    def trained_count(self) -> int:
        """Number of tokens that are trained on: its length in every mean and denominator."""
        return int(np.count_nonzero(self.provenance != Provenance.OBSERVED))

    @property
    def oldest_version(self) -> int:
        """Lowest policy version among the segments."""
        return self.segments[0].policy_version

    def staleness(self, trained_by: int) -> IntArray:
        """`[L]` optimizer steps from each token's policy version to the one that trains on it."""
        return np.asarray(trained_by - self.versions(), np.int32)


@dataclass(frozen=True, slots=True)
class VerifiableTrajectory(Trajectory):
    """A trajectory in its generator: its tokens can still be verified. K is the stored top-K.

    Training does not read the additional fields, so they do not travel to the trainer.
    """

    topk_ids: IntArray
    """`[L, K]` as in `KeptTokens`: for a token that was not verified, the K most probable ones."""
    topk_logprobs: FloatArray
    """Padded with id -1 and -inf if fewer have mass."""
    noise_seeds: SeedArray
    """`[L]` as in `KeptTokens`."""

    def kept(self) -> KeptTokens:
        """Return all tokens as `KeptTokens`, to be verified under a newer policy."""
        return KeptTokens(
            self.tokens,
            self.behaviour_logprobs,
            self.topk_ids,
            self.topk_logprobs,
            self.noise_seeds,
            ~self.trained,
            contexts=self.contexts,
        )


@dataclass(slots=True)
class TrajectoryBuilder:
    """A trajectory while it is generated: append an engine's chunks, then `finish`."""

    id: SampleId
    prompt_id: str
    prompt_tokens: IntArray
    _tokens: list[IntArray] = field(default_factory=list)
    _logprobs: list[FloatArray] = field(default_factory=list)
    _topk_ids: list[IntArray] = field(default_factory=list)
    _topk_logprobs: list[FloatArray] = field(default_factory=list)
    _noise_seeds: list[SeedArray] = field(default_factory=list)
    _provenance: bytearray = field(default_factory=bytearray)
    _segments: list[Segment] = field(default_factory=list)
    _length: int = 0
    turn_start: int = 0
    """Number of tokens of earlier turns: up to the last observed one."""
    contexts: tuple[int, ...] = ()
    context_start: int = 0
    """Start of the present context's response, after its prompt."""

    def __len__(self) -> int:
        return self._length

    def append(
        self,
        *,
        tokens: IntArray,
        logprobs: FloatArray,
        topk_ids: IntArray,
        topk_logprobs: FloatArray,
        noise_seeds: SeedArray,
        provenance: ByteArray,
        policy_version: int,
    ) -> None:
        """Append n tokens drawn under one policy version; shapes as in `VerifiableTrajectory`.

        Raises ValueError for arrays of different lengths, or a version older than the last one.
        """
        n = len(tokens)
        kinds = provenance.tobytes()
        others = (logprobs, topk_ids, topk_logprobs, noise_seeds, kinds)
        if any(len(one) != n for one in others):
            raise ValueError(f"trajectory {self.id}: the arrays of a chunk differ in length")
        if n == 0:
            return
        if self._segments and policy_version < self._segments[-1].policy_version:
            raise ValueError(
                f"trajectory {self.id}: a chunk of policy version {policy_version} follows one of "
                f"version {self._segments[-1].policy_version}; versions must not fall"
            )
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)
        self._topk_ids.append(topk_ids)
        self._topk_logprobs.append(topk_logprobs)
        self._noise_seeds.append(noise_seeds)
        self._provenance += kinds
        start, end = self._length, self._length + n
        if self._segments and self._segments[-1].policy_version == policy_version:
            start = self._segments.pop().start
        self._segments.append(Segment(policy_version, start, end))
        self._length = end
        if Provenance.OBSERVED in kinds:
            self.turn_start = end - n + kinds.rindex(Provenance.OBSERVED) + 1

    def append_observed(self, tokens: IntArray) -> None:
        """Append n observed tokens, which end a turn, with the version of the token before them.

        Raises ValueError if no token is before them.
        """
        if not self._segments:
            raise ValueError(f"trajectory {self.id}: observed tokens follow no turn of the policy")
        n, k = len(tokens), self._topk_ids[-1].shape[1]
        ids = np.full((n, k), -1, np.int32)
        values = np.full((n, k), -np.inf, np.float32)
        ids[:, :1], values[:, :1] = tokens[:, None], 0.0
        self.append(
            tokens=tokens,
            logprobs=np.zeros(n, np.float32),
            topk_ids=ids,
            topk_logprobs=values,
            noise_seeds=np.zeros(n, np.uint64),
            provenance=np.full(n, Provenance.OBSERVED, np.uint8),
            policy_version=self._segments[-1].policy_version,
        )

    def begin_context(self, prompt_tokens: IntArray) -> None:
        """Begin a new context: what follows is generated after these observed tokens alone.

        Raises ValueError if there are none, or no token before them.
        """
        if not len(prompt_tokens):
            raise ValueError(f"trajectory {self.id}: a context begins with an empty prompt")
        place = self._length
        self.append_observed(prompt_tokens)
        self.contexts, self.context_start = (*self.contexts, place), self._length

    @property
    def context_prompt(self) -> IntArray:
        """`[P]` the prompt of the present context."""
        if not self.contexts:
            return self.prompt_tokens
        return self.tokens()[self.contexts[-1] : self.context_start]

    @property
    def used_tokens(self) -> int:
        """Used part of `sampling.max_tokens`: the present context beyond the first prompt."""
        beyond = 0
        if self.contexts:
            beyond = self.context_start - self.contexts[-1] - len(self.prompt_tokens)
        return max(0, beyond) + self._length - self.context_start

    def observed(self) -> BoolArray:
        """Return `[L]` whether each token so far was observed."""
        return np.asarray(self._kinds() == Provenance.OBSERVED)

    def _kinds(self) -> ByteArray:
        return np.frombuffer(bytes(self._provenance), np.uint8)

    @property
    def oldest_version(self) -> int | None:
        """Lowest policy version among the segments; None before the first token."""
        return self._segments[0].policy_version if self._segments else None

    def tokens(self) -> IntArray:
        """Return `[L]` tokens appended so far."""
        if len(self._tokens) > 1:  # joined once, whatever the number of turns
            self._tokens = [np.concatenate(self._tokens)]
        return self._tokens[0].copy() if self._tokens else np.empty(0, np.int32)

    def forget_versions_after(self, version: int) -> None:
        """Do `Trajectory.without_versions_after` in place."""
        if self._segments and self._segments[-1].policy_version > version:
            self._segments = [Segment(UNKNOWN_VERSION, 0, self._length)]

    def count(self, provenance: Provenance) -> int:
        """Count the tokens with this provenance."""
        return self._provenance.count(provenance)

    def kept(self) -> KeptTokens:
        """Return the tokens appended so far, to be verified; ValueError if there are none."""
        return self.finish("abort").kept()

    def finish(self, reason: FinishReason) -> VerifiableTrajectory:
        """Return the immutable trajectory. Raises ValueError if nothing was appended."""
        if not self._length:
            raise ValueError(f"trajectory {self.id}: finished without any token")
        return VerifiableTrajectory(
            id=self.id,
            prompt_id=self.prompt_id,
            prompt_tokens=_frozen(self.prompt_tokens, np.int32),
            tokens=_frozen(np.concatenate(self._tokens), np.int32),
            behaviour_logprobs=_frozen(np.concatenate(self._logprobs), np.float32),
            topk_ids=_frozen(np.concatenate(self._topk_ids), np.int32),
            topk_logprobs=_frozen(np.concatenate(self._topk_logprobs), np.float32),
            noise_seeds=_frozen(np.concatenate(self._noise_seeds), np.uint64),
            provenance=_frozen(self._kinds(), np.uint8),
            segments=tuple(self._segments),
            finish_reason=reason,
            contexts=self.contexts,
        )


def _frozen(values: NDArray[ScalarT], dtype: type[ScalarT]) -> NDArray[ScalarT]:
    out = np.ascontiguousarray(values, dtype)
    out.setflags(write=False)
    return out
