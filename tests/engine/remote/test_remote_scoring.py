"""Scores of given tokens on real engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
from served_engine import (
    PROMPT,
    TOP_K,
    VOCAB,
    Served,
    ask,
    collect_all,
    drawn,
    reference,
)

from asyncrl.engine.protocol import SamplingParams, Score, ScoreRequest


def test_long_texts_are_scored_by_parts(served: Served) -> None:
    """Together with running responses, so that the parts are cut differently each time."""
    served.install(served.old)
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, VOCAB, n).astype(np.int32) for n in (390, 129, 127, 250, 60, 1)]
    sampling = SamplingParams(1, top_k_logprobs=TOP_K)
    requests = [ScoreRequest(f"s{i}", PROMPT, text, sampling) for i, text in enumerate(texts)]

    async def both() -> list[Score]:
        running = [ask(f"w{i}", max_tokens=60, cache_key="parts") for i in range(8)]
        responses = asyncio.create_task(collect_all(served.engine, running))
        scores = await served.engine.score(requests)
        await responses
        return scores

    for one, text in zip(served.call(both()), texts, strict=True):
        np.testing.assert_allclose(one.logprobs, drawn(served.old, PROMPT, text), atol=1e-3)
        logprobs = reference(served.old, np.concatenate([PROMPT, text])[None])[0, 2:-1].numpy()
        best = -np.sort(-logprobs, axis=1)[:, :TOP_K]
        np.testing.assert_allclose(one.topk_logprobs, best, atol=1e-3)


def test_lists_are_padded_where_fewer_tokens_can_be_drawn(served: Served) -> None:
    served.install(served.old)
    sampling = SamplingParams(1, top_k_logprobs=TOP_K, top_p=0.3)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 30).astype(np.int32)
    (one,) = served.call(served.engine.score([ScoreRequest("s", PROMPT, tokens, sampling)]))
    logprobs = reference(served.old, np.concatenate([PROMPT, tokens])[None], top_p=0.3)[0, 2:-1]
    few = ((logprobs > -np.inf).sum(-1) < TOP_K).numpy()
    assert 0 < few.sum() < len(few)
    np.testing.assert_array_equal((one.topk_ids == -1).any(axis=1), few)
    np.testing.assert_array_equal(one.topk_ids == -1, np.isneginf(one.topk_logprobs))
    np.testing.assert_allclose(
        one.logprobs, drawn(served.old, PROMPT, tokens, top_p=0.3), atol=1e-3
    )
    none = replace(sampling, top_k_logprobs=0)
    (bare,) = served.call(served.engine.score([ScoreRequest("b", PROMPT, tokens, none)]))
    assert bare.topk_ids.shape == bare.topk_logprobs.shape == (30, 0)
    np.testing.assert_allclose(bare.logprobs, one.logprobs, atol=1e-4)
