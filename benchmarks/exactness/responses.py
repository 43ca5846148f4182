"""The responses that `benchmarks.exactness.engines` asks engines for, and their distribution.

A random Qwen3 of six tokens, one of which is the stop token; responses of at most four tokens.
Temperature and top-p are not 1, so the sampled distribution differs from the model's own. It is
computed over all contexts by a plain Hugging Face forward pass in double precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.protocol import GenerateRequest, SamplingParams, TokenChunk
from asyncrl.rollout.trajectory import KeptTokens
from benchmarks.exactness.model import Codes, TabularPolicy, cells, nucleus

VOCABULARY, LENGTH, STOP, TOP_K = 6, 4, 5, 3
TEMPERATURE, TOP_P = 0.8, 0.95
PROMPT = np.array([1, 2, 3], np.int32)


@torch.no_grad()
def enumerate_policy(model: Any) -> TabularPolicy:
    """The policy of a model after every context; a response that stopped continues with STOP."""
    model = model.double()
    tables = []
    for at in range(LENGTH):
        texts = np.array(list(itertools.product(range(VOCABULARY), repeat=at)), np.int64)
        texts = texts.reshape(VOCABULARY**at, at)
        prompts = np.broadcast_to(PROMPT, (len(texts), len(PROMPT)))
        logits = model(torch.from_numpy(np.concatenate([prompts, texts], axis=1))).logits[:, -1]
        table = nucleus(torch.softmax(logits / TEMPERATURE, -1).numpy(), TOP_P)
        table[(texts == STOP).any(axis=1)] = np.eye(VOCABULARY)[STOP]
        tables.append(table)
    model.float()
    return TabularPolicy(tuple(tables))


def make_request(name: str, cache_key: str, kept: KeptTokens | None = None) -> GenerateRequest:
    """A request whose seed the engine chooses, so kept tokens were drawn with another one."""
    sampling = SamplingParams(
        max_tokens=LENGTH,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        stop_tokens=(STOP,),
        top_k_logprobs=TOP_K,
    )
    return GenerateRequest(name, cache_key, PROMPT, sampling, kept=kept)


def kept_of(chunks: Sequence[TokenChunk], cut: int) -> KeptTokens:
    """The first `cut` tokens of a response.

    The cut must not depend on the response. A random share of its *length* does, because the length
    tells where it stopped. (This benchmark did that at first, and its own test failed.)
    """
    fields = ("tokens", "logprobs", "topk_ids", "topk_logprobs", "noise_seeds")
    parts = [np.concatenate([getattr(chunk, field) for chunk in chunks]) for field in fields]
    return KeptTokens(*(part[:cut].copy() for part in parts))


def cells_of(responses: Sequence[Sequence[TokenChunk]]) -> Codes:
    """`[n]` cell of each response, padded with STOP."""
    texts: NDArray[np.int64] = np.full((len(responses), LENGTH), STOP, np.int64)
    for row, chunks in enumerate(responses):
        tokens = np.concatenate([chunk.tokens for chunk in chunks])
        ended = len(tokens) == LENGTH or (len(tokens) > 0 and tokens[-1] == STOP)
        assert ended, f"{chunks[0].request_id} generated {tokens}"
        assert not (tokens[:-1] == STOP).any(), f"{chunks[0].request_id} generated {tokens}"
        texts[row, : len(tokens)] = tokens
    return cells(texts, VOCABULARY)
