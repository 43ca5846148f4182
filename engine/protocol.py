"""The protocol of every engine: requests and weights in, token chunks out.

An engine does not know groups, epochs or rewards: the samples of a group are requests with the same
`cache_key`. It raises `asyncrl.engine.errors.EngineError` and its subclasses, with the request id.

A response of several turns alternates generated and observed tokens. A stop token or stop string
that ends a turn is part of the response, and observed tokens follow it. So only what was generated
after the last observed token can end the response.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from asyncrl.rollout.trajectory import (
    BoolArray,
    ByteArray,
    FinishReason,
    FloatArray,
    IntArray,
    KeptTokens,
    Provenance,
    SeedArray,
    TrajectoryBuilder,
)
from asyncrl.rollout.truncation import Truncation
from asyncrl.wire.records.step import EngineStats
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest

if TYPE_CHECKING:  # needs numba, which the controller does without
    from asyncrl.engine.sampling.stopping import StopRule


def turn_start(observed: BoolArray, count: int) -> int:
    """Return the length of earlier turns, up to the last of `count` tokens that was observed."""
    places = np.flatnonzero(observed[:count])
    return int(places[-1]) + 1 if len(places) else 0


def turn_end(observed: BoolArray, begin: int) -> int:
    """Return the index of the first observed token from `begin` on; L if there is none."""
    places = np.flatnonzero(observed[begin:])
    return begin + int(places[0]) if len(places) else len(observed)


def provenance_of(kept: KeptTokens, accepted: int) -> ByteArray:
    """Return the reported `Provenance` of the first kept tokens, `[accepted]`."""
    observed = kept.observed[:accepted]
    return np.where(observed, Provenance.OBSERVED, Provenance.VERIFIED).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Settings of draws. The distribution after temperature and truncation is *the* policy."""

    max_tokens: int
    """Largest number of response tokens, a resumed prefix included."""
    temperature: float = 1.0
    """Greater than 0: greedy decoding has no behaviour probability."""
    top_p: float = 1.0
    """Probability mass of nucleus sampling; 1.0: off."""
    top_k: int = 0
    """Sample from the k most probable tokens; 0: off."""
    min_p: float = 0.0
    """Drop tokens less than min_p times as probable as the most probable one; 0: off. See
    `asyncrl.rollout.truncation` for the order of these."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end the response; they are part of it."""
    stop_rule: StopRule | None = None
    """Completing a stop string ends the response; the token that completes it is part of it."""
    top_k_logprobs: int = 64
    """K: number of most probable tokens reported per position: the engine's, or 0. A smaller
    vocabulary is reported whole, and the rest of each list is padding."""
    seed: int | None = None
    """Seed of this request's random stream; None: the next one of the engine's stream."""
    max_turn_tokens: int | None = None
    """Largest number of generated tokens in a turn; reaching it ends the response as `max_tokens`
    does. None: no such limit."""

    def last_token(self, turn_start: int) -> int:
        """Return the length of a response at which the turn that began there reaches its limit."""
        if self.max_turn_tokens is None:
            return self.max_tokens
        return min(self.max_tokens, turn_start + self.max_turn_tokens)

    @property
    def truncation(self) -> Truncation:
        """Truncation of the distribution."""
        return Truncation(self.top_k, self.top_p, self.min_p)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Continue `prompt_tokens + prefix_tokens` until a stop token, a stop string or the limit."""

    request_id: str
    cache_key: str
    """Name of the tree that this request drafts from and feeds; "": none."""
    prompt_tokens: IntArray
    """`[P]`, P >= 1."""
    sampling: SamplingParams
    prefix_tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """`[S]` response tokens to resume from; they are not reported again."""
    draft_tokens: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """`[D]` an earlier continuation of the prefix, drafted from first. It changes speed only."""
    kept: KeptTokens | None = None
    """Response tokens that follow the prefix, drawn earlier under another policy and never trained
    on. They are scored under the current policy. Accepted ones are reported first (provenance
    VERIFIED, with the current policy's log-probabilities), then the token drawn in the place of the
    first rejected one, then new tokens. Rejected ones are drafted from. Nothing but acceptance may
    depend on kept tokens: `sampling.seed` must not be the seed that drew them. Observed ones are
    accepted with the token before them, are reported with provenance OBSERVED, and separate turns:
    a stop before them does not end the response."""
    priority: int = 0
    """Requests with lower values are served first. Primary work is 0; run-ahead is greater."""
    order: int = 0
    """Tie-break within one priority: lower first, then order of arrival; 0 to 2**32 - 1."""
    turn_start: int = 0
    """Number of prefix tokens that belong to earlier turns, observed ones included. Stop tokens and
    stop strings in them ended those turns, not this one."""
    session: str = ""
    """Names the response that this is a turn of, the same for all of its turns; "": the only one.
    An engine may keep the KV of a turn until the next one comes, or `Engine.end_session`. It
    changes speed only."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The next n tokens of a response, drawn under one policy version; n may be 0 at the end."""

    request_id: str
    tokens: IntArray
    """`[n]`"""
    logprobs: FloatArray
    """`[n]` log-probability of each token after temperature and truncation."""
    topk_ids: IntArray
    """`[n, K]` the most probable ids, padded with -1. A verified token, or one drawn in the place
    of a rejected one, has the list of the kept token that stood there."""
    topk_logprobs: FloatArray
    """`[n, K]`, padded with -inf."""
    noise_seeds: SeedArray
    """`[n]` seeds of the noise that drew tokens outside the top K (`engine.sampling.drawing`)."""
    provenance: ByteArray
    """`[n]` of `Provenance`."""
    policy_version: int
    finish_reason: FinishReason | None = None
    """Set on the last chunk of a request, and only there."""

    @classmethod
    def empty_abort(cls, request: GenerateRequest, policy_version: int) -> TokenChunk:
        """Return the last chunk of a request that was aborted with nothing left to report."""
        k = request.sampling.top_k_logprobs
        return cls(
            request_id=request.request_id,
            tokens=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            topk_ids=np.empty((0, k), np.int32),
            topk_logprobs=np.empty((0, k), np.float32),
            noise_seeds=np.empty(0, np.uint64),
            provenance=np.empty(0, np.uint8),
            policy_version=policy_version,
            finish_reason="abort",
        )

    def append_to(self, builder: TrajectoryBuilder) -> None:
        """Append the tokens to a trajectory. Raises ValueError as `TrajectoryBuilder.append`."""
        builder.append(
            tokens=self.tokens,
            logprobs=self.logprobs,
            topk_ids=self.topk_ids,
            topk_logprobs=self.topk_logprobs,
            noise_seeds=self.noise_seeds,
            provenance=self.provenance,
            policy_version=self.policy_version,
        )

    def outside_top_k(self) -> int:
        """Count the tokens that are not among the top K reported with them."""
        listed = np.count_nonzero(self.topk_ids == self.tokens[:, None])  # no id is listed twice
        return len(self.tokens) - int(listed)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Score `tokens` as a continuation of `prompt_tokens` under the current policy."""

    request_id: str
    prompt_tokens: IntArray
    tokens: IntArray
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of n given tokens under the distribution that the engine samples from."""

    request_id: str
    logprobs: FloatArray
    """`[n]`; -inf for a token that truncation leaves out."""
    topk_ids: IntArray
    """`[n, K]`"""
    topk_logprobs: FloatArray
    """`[n, K]`"""
    policy_version: int


class Engine(Protocol):
    """A generator of tokens. All methods are called from one asyncio event loop."""

    async def start(self) -> None:
        """Load the model and become ready. Raises `EngineStartError` with what to change."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Stream a response, its first token at once; closing the iterator aborts the request."""

    def interrupt(self, request_id: str) -> None:
        """End a request: its stream reports all finished steps and ends with `abort`.

        Returns at once. The request ends before the next step; in another process before the step
        after the message arrives. Unknown and ended requests are ignored. No token of a finished
        step is lost, so the place of the cut does not depend on the tokens after it. A cut at the
        last *report* would: it reveals that the unreported tokens hold no stop token.
        """

    def end_session(self, session: str) -> None:
        """Free what is kept for the next turn of this response; at once, and idempotent."""

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score given tokens under one policy version; scores have the order of the requests."""

    async def pause(self) -> None:
        """Stop drawing tokens; running requests keep their state. Idempotent."""

    async def resume(self) -> None:
        """Continue after `pause`. Idempotent."""

    async def stage_weights(self, manifest: WeightManifest) -> None:
        """Copy published weights into the engine's staging memory; generation continues.

        The next version replaces one that is never installed. Raises WeightsSupersededError if
        these weights were overwritten or removed, WeightsError if they do not fit the model or
        cannot be read as one whole version; nothing is staged then.
        """

    async def install_weights(self, policy_version: int) -> None:
        """Replace the weights by the staged ones between two steps.

        Running requests continue with their KV. No token is ever drawn from a mixture of two
        versions. Raises WeightsError if this version is not staged, or was installed before.
        """

    async def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the weights in use; not called during an installation.

        Tokens may be drawn during it; the caller delivers none of them before it has compared.
        Names are those of the HF state dict; tensors that cannot be compared are left out.
        """

    async def save_cache(self) -> int:
        """Write a snapshot of the rollout cache if it has a path for one; return its bytes."""

    def stats(self) -> EngineStats:
        """Return counters and gauges, without waiting."""

    async def close(self) -> None:
        """Abort all requests and free everything. Idempotent."""
