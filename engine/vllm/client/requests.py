"""Requests and scores of the protocol in vLLM's words. Does not import vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import EngineError, RequestError
from engine.protocol import GenerateRequest, SamplingParams, Score, ScoreRequest, TokenChunk
from engine.vllm.client.steps import Step, most_probable, not_finite
from engine.vllm.worker.batch import request_extra
from rollout.trajectory import FloatArray, IntArray, KeptTokens

LEAST_TEMPERATURE = 0.01
"""vLLM silently raises a lower one to this."""


def check_temperature(name: str, sampling: SamplingParams) -> None:
    """Raise RequestError for a temperature that vLLM would change."""
    if sampling.temperature < LEAST_TEMPERATURE:
        raise RequestError(
            f"request {name!r}: temperature={sampling.temperature} must be at least "
            f"{LEAST_TEMPERATURE} on vLLM"
        )


def generate_arguments(
    request: GenerateRequest, seed: int, vocab_size: int
) -> tuple[list[int], dict[str, Any]]:
    """Tokens to start from, and the arguments of vLLM's `SamplingParams`."""
    sampling = request.sampling
    written = len(request.prefix_tokens)
    params = _common(sampling) | {
        "max_tokens": sampling.max_tokens - written,
        "stop_token_ids": list(sampling.stop_tokens),
        "logprobs": min(sampling.top_k_logprobs, vocab_size),
        "extra_args": request_extra(
            seed=seed, written=written, cache_key=request.cache_key, old=request.draft_tokens
        ),
    }
    tokens: list[int] = np.concatenate([request.prompt_tokens, request.prefix_tokens]).tolist()
    return tokens, params


def score_arguments(
    request: ScoreRequest, seed: int, vocab_size: int
) -> tuple[list[int], dict[str, Any]]:
    """As `generate_arguments`; vLLM must draw one token, which is thrown away."""
    count = len(request.tokens)
    params = _scoring(request.sampling, vocab_size) | {
        "extra_args": request_extra(seed=seed, written=count, scored=count)
    }
    tokens: list[int] = np.concatenate([request.prompt_tokens, request.tokens]).tolist()
    return tokens, params


def verify_arguments(
    request: GenerateRequest, kept: KeptTokens, seed: int, vocab_size: int
) -> tuple[list[int], dict[str, Any]]:
    """To score a request's kept tokens, and the tokens that were most probable in their place."""
    prefix, count = request.prefix_tokens, len(kept)
    params = _scoring(request.sampling, vocab_size) | {
        "extra_args": request_extra(
            seed=seed, written=len(prefix) + count, scored=count, known=kept.topk_ids
        )
    }
    tokens: list[int] = np.concatenate([request.prompt_tokens, prefix, kept.tokens]).tolist()
    return tokens, params


@dataclass(frozen=True, slots=True)
class Table:
    """What came back of a scoring request: the worker's columns by name (`worker.scoring`)."""

    own: FloatArray
    """`[n]` log-probabilities of the tokens."""
    topk_ids: IntArray
    """`[n, K]` padded with -1."""
    topk_logprobs: FloatArray
    tail_ids: IntArray
    """`[n]`"""
    tail_logprobs: FloatArray
    known_logprobs: FloatArray
    """`[n, K']` at the ids that the request named."""

    @classmethod
    def of(cls, name: str, step: Step, asked: int, vocab_size: int) -> Table:
        """Read a scoring request's only step; K most probable were `asked` for."""
        ids, values = step.scored_ids, step.scored_logprobs
        if ids is None or values is None:
            raise EngineError(f"request {name!r}: vLLM sent no prompt log-probabilities")
        if np.isnan(values).any():
            raise EngineError(not_finite(name))
        k = min(asked, vocab_size)
        topk_ids, topk_logprobs = most_probable(ids[:, : 1 + k], values[:, : 1 + k], asked)
        return cls(
            own=np.ascontiguousarray(values[:, 0]),
            topk_ids=topk_ids,
            topk_logprobs=topk_logprobs,
            tail_ids=np.ascontiguousarray(ids[:, 1 + k]),
            tail_logprobs=np.ascontiguousarray(values[:, 1 + k]),
            known_logprobs=np.ascontiguousarray(values[:, 2 + k :]),
        )


def score_of(request: ScoreRequest, step: Step, vocab_size: int) -> Score:
    """The score in a scoring request's only step."""
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
    ids, logprobs = _nothing(request.sampling.top_k_logprobs)
    none = np.empty(0, np.float32)
    no_ids = np.empty(0, np.int32)
    return Score(request.request_id, none, ids, logprobs, no_ids, none, policy_version)


def empty_end(request: GenerateRequest, policy_version: int) -> TokenChunk:
    """The last chunk of a request that the engine's end cut off."""
    ids, logprobs = _nothing(request.sampling.top_k_logprobs)
    return TokenChunk(
        request_id=request.request_id,
        tokens=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        topk_ids=ids,
        topk_logprobs=logprobs,
        provenance=np.empty(0, np.uint8),
        policy_version=policy_version,
        finish_reason="abort",
    )


def _common(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # Only our stop tokens end a response; what the model's files say does not.
        "ignore_eos": True,
        "detokenize": False,
    }


def _scoring(sampling: SamplingParams, vocab_size: int) -> dict[str, Any]:
    return _common(sampling) | {
        "max_tokens": 1,
        "prompt_logprobs": min(sampling.top_k_logprobs, vocab_size),
    }


def _nothing(k: int) -> tuple[IntArray, FloatArray]:
    return np.empty((0, k), np.int32), np.empty((0, k), np.float32)
