"""Converts requests and scores between the protocol and the core."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from asyncrl.engine.errors import EngineError, RequestError
from asyncrl.engine.protocol import GenerateRequest, SamplingParams, Score, ScoreRequest
from asyncrl.engine.remote.client.core import Core, CoreRequest
from asyncrl.engine.remote.client.responses import Scored, not_finite
from asyncrl.engine.remote.extras import RequestExtra, ScoreColumns
from asyncrl.rollout.trajectory import FloatArray, IntArray, KeptTokens

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
    extra = RequestExtra(seed=seed, cache_key=request.cache_key, draft=request.draft_tokens)
    left = request.sampling.max_tokens - len(request.prefix_tokens)
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
