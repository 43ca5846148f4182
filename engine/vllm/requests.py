"""Requests and scores of the protocol in vLLM's words. Does not import vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np

from cache.trajectory import FloatArray, IntArray
from engine.errors import EngineError, RequestError
from engine.protocol import GenerateRequest, SamplingParams, Score, ScoreRequest, TokenChunk
from engine.vllm.rows import request_extra
from engine.vllm.steps import Step, most_probable

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
    request: GenerateRequest, vocab_size: int
) -> tuple[list[int], dict[str, Any]]:
    """Tokens to start from, and the arguments of vLLM's `SamplingParams`."""
    sampling = request.sampling
    written = len(request.prefix_tokens)
    params = _common(sampling) | {
        "max_tokens": sampling.max_tokens - written,
        "stop_token_ids": list(sampling.stop_tokens),
        "logprobs": min(sampling.top_k_logprobs, vocab_size),
        "seed": _seed(sampling.seed, written),
    }
    if request.cache_key:
        params["extra_args"] = request_extra(request.cache_key, request.draft_tokens)
    tokens: list[int] = np.concatenate([request.prompt_tokens, request.prefix_tokens]).tolist()
    return tokens, params


def score_arguments(request: ScoreRequest, vocab_size: int) -> tuple[list[int], dict[str, Any]]:
    """As `generate_arguments`; vLLM must draw one token, which is thrown away."""
    params = _common(request.sampling) | {
        "max_tokens": 1,
        "prompt_logprobs": min(request.sampling.top_k_logprobs, vocab_size),
    }
    tokens: list[int] = np.concatenate([request.prompt_tokens, request.tokens]).tolist()
    return tokens, params


def score_of(request: ScoreRequest, step: Step) -> Score:
    """The score in a scoring request's only step."""
    if step.scored_ids is None or step.scored_logprobs is None:
        raise EngineError(f"request {request.request_id!r}: vLLM sent no prompt log-probabilities")
    # Row i is about token i + 1.
    first, end = (
        len(request.prompt_tokens) - 1,
        len(request.prompt_tokens) - 1 + len(request.tokens),
    )
    ids, logprobs = step.scored_ids[first:end], step.scored_logprobs[first:end]
    topk_ids, topk_logprobs = most_probable(ids, logprobs, request.sampling.top_k_logprobs)
    return Score(
        request_id=request.request_id,
        logprobs=np.ascontiguousarray(logprobs[:, 0]),
        topk_ids=topk_ids,
        topk_logprobs=topk_logprobs,
        policy_version=step.policy_version,
    )


def unscored(request: ScoreRequest, policy_version: int) -> Score:
    """The score of no tokens."""
    ids, logprobs = _nothing(request.sampling.top_k_logprobs)
    return Score(request.request_id, np.empty(0, np.float32), ids, logprobs, policy_version)


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


def _seed(seed: int | None, written: int) -> int | None:
    """A resumed response must not draw with the noise that its prefix was drawn with."""
    if seed is None:
        return None
    mixed = np.random.SeedSequence([seed % (1 << 63), written]).generate_state(1, np.uint64)
    return int(mixed[0] >> np.uint64(1))


def _nothing(k: int) -> tuple[IntArray, FloatArray]:
    return np.empty((0, k), np.int32), np.empty((0, k), np.float32)
