"""Generates responses: kept tokens are verified first, then the core draws the rest.

The worker judges kept tokens in one prefill (`asyncrl.engine.remote.worker.scoring`). The rest of
the response becomes an ordinary request with a longer prefix, most of whose KV is in the engine's
prefix cache, and with the rejected tokens as its draft. Accepted tokens carry the version that
judged them, even if the weights change before the response resumes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.engine.errors import EngineError, RequestError
from asyncrl.engine.protocol import (
    GenerateRequest,
    SamplingParams,
    Score,
    ScoreRequest,
    TokenChunk,
    provenance_of,
    turn_end,
    turn_start,
)
from asyncrl.engine.remote.client.core import Core, CoreRequest
from asyncrl.engine.remote.client.responses import Scored, not_finite
from asyncrl.engine.remote.client.streams import Reader, Streams
from asyncrl.engine.remote.extras import Outcome, RequestExtra, ScoreColumns
from asyncrl.engine.requests import Limits, SeedStream
from asyncrl.engine.sampling.drawing import noise_seeds
from asyncrl.rollout.trajectory import (
    FinishReason,
    FloatArray,
    IntArray,
    KeptTokens,
    Provenance,
    SeedArray,
)

_SCORE_PRIORITY = -1
"""Served before primary work, because a caller waits for all scores."""


def check_temperature(name: str, sampling: SamplingParams, core: Core) -> None:
    """Raise RequestError for a temperature that the engine would change."""
    if sampling.temperature < core.min_temperature:
        raise RequestError(
            f"request {name!r}: temperature={sampling.temperature} must be at least "
            f"{core.min_temperature} on {core.name}"
        )


def _priority(request: GenerateRequest) -> int:
    """Combine priority and order in the number by which the core sorts; ties go by arrival."""
    return (request.priority << 32) + request.order


def generation(request: GenerateRequest, seed: int) -> CoreRequest:
    """Return a request that continues from its prefix."""
    extra = RequestExtra(
        seed=seed,
        cache_key=request.cache_key,
        draft=request.draft_tokens,
        priority=request.priority,
    )
    end = request.sampling.last_token(request.turn_start)
    left = end - len(request.prefix_tokens)
    return _request(request, extra, _priority(request), request.prefix_tokens, max_tokens=left)


def scoring(request: ScoreRequest, seed: int) -> CoreRequest:
    """Return a request that scores its tokens."""
    extra = RequestExtra(seed=seed, scored=len(request.tokens))
    return _request(request, extra, _SCORE_PRIORITY, request.tokens)


def verification(request: GenerateRequest, kept: KeptTokens, seed: int) -> CoreRequest:
    """Return a request that verifies its kept tokens."""
    extra = RequestExtra(seed=seed, scored=len(kept), kept=kept)
    return _request(request, extra, _priority(request), request.prefix_tokens, kept.tokens)


def _request(
    request: GenerateRequest | ScoreRequest,
    extra: RequestExtra,
    priority: int,
    *response: IntArray,
    max_tokens: int = 0,
) -> CoreRequest:
    """Return a request for the prompt and parts of its `response`; without a limit it scores."""
    sampling = request.sampling
    return CoreRequest(
        tokens=np.concatenate([request.prompt_tokens, *response]).tolist(),
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop_tokens=sampling.stop_tokens if max_tokens else (),
        extra=replace(
            extra,
            generated=sum(map(len, response)),
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            top_k_logprobs=sampling.top_k_logprobs,
        ),
        priority=priority,
    )


@dataclass(frozen=True, slots=True)
class Table:
    """The result of a scoring request, by the names of its columns (`ScoreColumns`)."""

    tokens: IntArray
    """`[n]` the scored tokens, or those that verification leaves."""
    logprobs: FloatArray
    """`[n]`"""
    outcomes: IntArray
    """`[n]` of `asyncrl.engine.remote.extras.Outcome`."""
    topk_ids: IntArray
    topk_logprobs: FloatArray

    @classmethod
    def of(cls, name: str, scored: Scored, top_k: int) -> Table:
        """Read the table of a scoring request that asked for lists of `top_k` tokens.

        Raises EngineError if the model's probabilities are not finite.
        """
        ids, values = scored.ids, scored.logprobs
        if np.isnan(values).any():
            raise EngineError(not_finite(name))
        columns = ScoreColumns(top_k)
        return cls(
            tokens=ids[:, columns.own].copy(),
            logprobs=values[:, columns.own].copy(),
            outcomes=ids[:, columns.outcome].copy(),
            topk_ids=ids[:, columns.listed].copy(),
            topk_logprobs=values[:, columns.listed].copy(),
        )


def score_of(request: ScoreRequest, scored: Scored) -> Score:
    """Return the score in a scoring request's table."""
    table = Table.of(request.request_id, scored, request.sampling.top_k_logprobs)
    return Score(
        request_id=request.request_id,
        logprobs=table.logprobs,
        topk_ids=table.topk_ids,
        topk_logprobs=table.topk_logprobs,
        policy_version=scored.policy_version,
    )


def unscored(request: ScoreRequest, policy_version: int) -> Score:
    """Return the score of an empty list of tokens."""
    none = np.empty((0, ScoreColumns(request.sampling.top_k_logprobs).width), np.float32)
    return score_of(request, Scored(none.astype(np.int32), none, policy_version))


def after_verification(
    request: GenerateRequest, kept: KeptTokens, table: Table, seed: int, policy_version: int
) -> tuple[TokenChunk | None, GenerateRequest]:
    """Return what to report of a request's kept tokens, and the request that continues.

    `table` is the worker's result under `policy_version`. The chunk has the finish reason if its
    tokens end the response; None: nothing was accepted or drawn.
    """
    tokens = table.tokens
    stays = int((table.outcomes == Outcome.KEPT).sum())
    provenance = np.full(len(tokens), Provenance.SAMPLED, np.uint8)
    provenance[:stays] = provenance_of(kept, stays)
    begun = turn_start(kept.observed, stays)
    count, reason = _end(request, tokens, begun)
    chunk = TokenChunk(
        request_id=request.request_id,
        tokens=tokens[:count],
        logprobs=table.logprobs[:count],
        topk_ids=table.topk_ids[:count],
        topk_logprobs=table.topk_logprobs[:count],
        noise_seeds=_noise_seeds(kept, table, seed, policy_version)[:count],
        provenance=provenance[:count],
        policy_version=policy_version,
        finish_reason=reason,
    )
    rest = replace(
        request,
        prefix_tokens=np.concatenate([request.prefix_tokens, tokens]).astype(np.int32),
        draft_tokens=kept.tokens[count : turn_end(kept.observed, stays)].astype(np.int32),
        kept=None,
        turn_start=len(request.prefix_tokens) + begun if begun else request.turn_start,
    )
    return (chunk if count else None), rest


def _noise_seeds(kept: KeptTokens, table: Table, seed: int, policy_version: int) -> SeedArray:
    """Return `[n]` seeds: accepted and renamed tokens keep theirs unless the rule is lenient."""
    (fresh,) = noise_seeds(np.array([seed], np.uint64), policy_version)
    if kept.lenience is not None:
        return np.full(len(table.tokens), fresh, np.uint64)
    old = kept.noise_seeds[: len(table.tokens)]
    return np.where(table.outcomes == Outcome.DRAWN, fresh, old)


def _end(request: GenerateRequest, tokens: IntArray, begun: int) -> tuple[int, FinishReason | None]:
    """Return the tokens up to the response's end and its reason; all and None if it continues.

    The first `begun` tokens belong to earlier turns, which their stops have ended.
    """
    last = tokens[begun:]
    ends = (np.flatnonzero(np.isin(last, request.sampling.stop_tokens)) + 1 + begun).tolist()[:1]
    rule = request.sampling.stop_rule
    if rule is not None:
        state = rule.start
        if not begun:
            _, state = rule.follow(state, request.prefix_tokens[request.turn_start :])
        count, _ = rule.follow(state, last)
        ends += [] if count is None else [begun + count]
    if ends:
        return min(ends), "stop"
    prefix = len(request.prefix_tokens)
    limit = request.sampling.last_token(prefix + begun if begun else request.turn_start)
    return len(tokens), "length" if prefix + len(tokens) >= limit else None


class Generation:
    """The `generate` calls of one engine."""

    def __init__(self, core: Core, streams: Streams, limits: Limits, seeds: SeedStream) -> None:
        self._core = core
        self._streams = streams
        self._limits = limits
        self._seeds = seeds
        self._readers: dict[str, list[Reader]] = {}
        """Readers by request id; several while earlier requests of this id are being left."""
        self._residual = 0

    @property
    def tokens_drawn(self) -> int:
        """Response tokens drawn since the start, without those that verification accepted."""
        return self._core.responses.tokens + self._residual

    async def chunks(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the response, until its end or an interruption.

        Raises RequestError if the request cannot be served, EngineError if the core failed.
        """
        name = request.request_id
        self._limits.check_generate(request)
        check_temperature(name, request.sampling, self._core)
        reader = Reader()
        self._readers.setdefault(name, []).append(reader)
        try:
            async with aclosing(self._response(request, reader)) as chunks:
                async for chunk in chunks:
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
            # Only an interruption or `close` ends a request from this side while it is read.
            yield TokenChunk.empty_abort(request, self._core.policy_version)
        finally:
            readers = self._readers[name]
            readers.remove(reader)
            if not readers:
                del self._readers[name]

    def interrupt(self, request_id: str) -> None:
        """End a request; does nothing if it has ended or is not known."""
        for reader in self._readers.get(request_id, ()):
            reader.interrupt()

    async def _response(
        self, request: GenerateRequest, reader: Reader
    ) -> AsyncGenerator[TokenChunk, None]:
        """Yield chunks up to the last one, fewer if the reader is interrupted."""
        seed = self._seeds.seed_of(request.sampling)
        if request.kept is not None and len(request.kept):
            verified = await self._verify(request, request.kept, seed, reader)
            if verified is None:
                return
            first, request = verified
            if first is not None:
                self._residual += int((first.provenance == Provenance.SAMPLED).sum())
                yield first
                if first.finish_reason is not None:
                    return
        submitted = generation(request, seed)
        async with aclosing(self._streams.chunks(request, seed, submitted, reader)) as parts:
            async for chunks in parts:
                for chunk in chunks:
                    yield chunk

    async def _verify(
        self, request: GenerateRequest, kept: KeptTokens, seed: int, reader: Reader
    ) -> tuple[TokenChunk | None, GenerateRequest] | None:
        """Let the worker verify kept tokens; None if that was interrupted."""
        name = request.request_id
        submitted = verification(request, kept, seed)
        scored = await self._streams.scored(name, submitted, reader)
        if scored is None:
            return None
        table = Table.of(name, scored, request.sampling.top_k_logprobs)
        return after_verification(request, kept, table, seed, scored.policy_version)
