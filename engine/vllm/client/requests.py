"""Requests and scores of the protocol in vLLM's terms. Does not import vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import EngineError, RequestError
from engine.protocol import GenerateRequest, SamplingParams, Score, ScoreRequest
from engine.vllm.client.core import CoreRequest
from engine.vllm.client.steps import Step, most_probable, not_finite
from engine.vllm.extras import RequestExtra, ScoreColumns
from rollout.trajectory import FloatArray, IntArray, KeptTokens

MIN_TEMPERATURE = 0.01
"""vLLM silently raises a lower one to this."""

_SCORE_PRIORITY = -1
"""Before primary work, because a caller waits for all scores."""


def check_temperature(name: str, sampling: SamplingParams) -> None:
    """Raise RequestError for a temperature that vLLM would change."""
    if sampling.temperature < MIN_TEMPERATURE:
        raise RequestError(
            f"request {name!r}: temperature={sampling.temperature} must be at least "
            f"{MIN_TEMPERATURE} on vLLM"
        )


def generation(request: GenerateRequest, seed: int, vocab_size: int) -> CoreRequest:
    """Continue a request from its prefix."""
    sampling, prefix = request.sampling, request.prefix_tokens
    extra = RequestExtra(
        seed=seed,
        generated=len(prefix),
        cache_key=request.cache_key,
        draft=request.draft_tokens,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )
    params = _common(sampling, extra) | {
        "max_tokens": sampling.max_tokens - len(prefix),
        "stop_token_ids": list(sampling.stop_tokens),
        "logprobs": min(sampling.top_k_logprobs, vocab_size),
    }
    return CoreRequest(_joined(request.prompt_tokens, prefix), params, request.priority)


def scoring(request: ScoreRequest, seed: int, vocab_size: int) -> CoreRequest:
    """Score the tokens of a request. vLLM must draw one token as well, which is thrown away."""
    count, sampling = len(request.tokens), request.sampling
    extra = RequestExtra(
        seed=seed, generated=count, scored=count, top_k=sampling.top_k, min_p=sampling.min_p
    )
    params = _scoring(sampling, extra, vocab_size)
    return CoreRequest(_joined(request.prompt_tokens, request.tokens), params, _SCORE_PRIORITY)


def verification(
    request: GenerateRequest, kept: KeptTokens, seed: int, vocab_size: int
) -> CoreRequest:
    """Score a request's kept tokens, and the tokens that were most probable in their place."""
    prefix, count = request.prefix_tokens, len(kept)
    extra = RequestExtra(
        seed=seed,
        generated=len(prefix) + count,
        scored=count,
        known=kept.topk_ids,
        top_k=request.sampling.top_k,
        min_p=request.sampling.min_p,
    )
    params = _scoring(request.sampling, extra, vocab_size)
    tokens = _joined(request.prompt_tokens, prefix, kept.tokens)
    return CoreRequest(tokens, params, request.priority)


@dataclass(frozen=True, slots=True)
class Table:
    """The result of a scoring request, by the names of its columns (`engine.vllm.extras`)."""

    own: FloatArray
    """`[n]` log-probabilities of the tokens."""
    topk_ids: IntArray
    """`[n, K]`, padded with -1."""
    topk_logprobs: FloatArray
    """`[n, K]`"""
    tail_ids: IntArray
    """`[n]`"""
    tail_logprobs: FloatArray
    """`[n]`"""
    known_logprobs: FloatArray
    """`[n, K']` at the ids that the request named."""

    @classmethod
    def of(cls, name: str, step: Step, top_k: int, vocab_size: int) -> Table:
        """Read the step of a scoring request that asked for the `top_k` most probable tokens.

        Raises:
            EngineError: the table is missing, or the model's probabilities are not finite.
        """
        ids, values = step.scored_ids, step.scored_logprobs
        if ids is None or values is None:
            raise EngineError(f"request {name!r}: vLLM sent no prompt log-probabilities")
        if np.isnan(values).any():
            raise EngineError(not_finite(name))
        k = min(top_k, vocab_size)
        columns = ScoreColumns(k, ids.shape[1] - ScoreColumns(k).width)
        listed = slice(0, columns.top_k.stop)
        topk_ids, topk_logprobs = most_probable(ids[:, listed], values[:, listed], top_k)
        return cls(
            own=np.ascontiguousarray(values[:, columns.own]),
            topk_ids=topk_ids,
            topk_logprobs=topk_logprobs,
            tail_ids=np.ascontiguousarray(ids[:, columns.tail]),
            tail_logprobs=np.ascontiguousarray(values[:, columns.tail]),
            known_logprobs=np.ascontiguousarray(values[:, columns.named]),
        )


def score_of(request: ScoreRequest, step: Step, vocab_size: int) -> Score:
    """The score in a scoring request's step."""
    table = Table.of(request.request_id, step, request.sampling.top_k_logprobs, vocab_size)
    return Score(
        request_id=request.request_id,
        logprobs=table.own,
        topk_ids=table.topk_ids,
        topk_logprobs=table.topk_logprobs,
        tail_ids=table.tail_ids,
        tail_logprobs=table.tail_logprobs,
        policy_version=step.policy_version,
    )


def unscored(request: ScoreRequest, policy_version: int) -> Score:
    """The score of no tokens."""
    k = request.sampling.top_k_logprobs
    none, no_ids = np.empty(0, np.float32), np.empty(0, np.int32)
    return Score(
        request_id=request.request_id,
        logprobs=none,
        topk_ids=np.empty((0, k), np.int32),
        topk_logprobs=np.empty((0, k), np.float32),
        tail_ids=no_ids,
        tail_logprobs=none,
        policy_version=policy_version,
    )


def _joined(*parts: IntArray) -> list[int]:
    tokens: list[int] = np.concatenate(parts).tolist()
    return tokens


def _common(sampling: SamplingParams, extra: RequestExtra) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # Only our stop tokens end a response; what the model's files say does not.
        "ignore_eos": True,
        "detokenize": False,
        "extra_args": extra.to_extra_args(),
    }


def _scoring(sampling: SamplingParams, extra: RequestExtra, vocab_size: int) -> dict[str, Any]:
    return _common(sampling, extra) | {
        "max_tokens": 1,
        "prompt_logprobs": min(sampling.top_k_logprobs, vocab_size),
    }
