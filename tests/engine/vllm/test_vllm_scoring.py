"""Scores of given tokens on real vLLM.

Tail draws are compared by chi-square with the distribution outside the listed tokens. The
comparison fails a right engine with probability ALARM = 1e-5.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import chi2
from served_vllm import (
    PROMPT,
    REAL_VLLM,
    VOCAB,
    WAYS,
    Served,
    ask,
    collect_all,
    drawn,
    reference,
)

from engine.protocol import SamplingParams, Score, ScoreRequest

pytestmark = REAL_VLLM
ALARM = 1e-5


@pytest.fixture
def served(served_in_small_kv: Served) -> Served:
    return served_in_small_kv


def score(served: Served, tokens: np.ndarray, seeds: Sequence[int], k: int = 4) -> list[Score]:
    return served.call(
        served.engine.score(
            [
                ScoreRequest(
                    f"s{seed}", PROMPT, tokens,
                    SamplingParams(1, seed=seed, top_k_logprobs=k, **WAYS[1]),
                )
                for seed in seeds
            ]
        )
    )  # fmt: skip


def test_tail_draws_follow_what_is_not_listed(served: Served) -> None:
    """Pooled over positions, against the reference outside the 2 listed tokens."""
    served.install(served.old)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 40).astype(np.int32)
    scores = score(served, tokens, range(400), k=2)
    outside = reference(served.old, np.concatenate([PROMPT, tokens])[None], **WAYS[1])[
        0, 2:-1
    ].exp()
    outside = outside.numpy().copy()
    np.testing.assert_array_equal(scores[0].topk_ids, scores[1].topk_ids)
    np.put_along_axis(outside, scores[0].topk_ids, 0.0, axis=1)
    tails = np.stack([one.tail_ids for one in scores])
    values = np.stack([one.tail_logprobs for one in scores])
    none = outside.sum(1) < 1e-6
    assert (tails[:, none] == -1).all()
    assert np.isneginf(values[:, none]).all()
    place = np.broadcast_to(np.arange(40), tails.shape)
    there = tails >= 0
    np.testing.assert_allclose(
        np.exp(values[there]), outside[place[there], tails[there]], rtol=1e-2, atol=1e-5
    )
    statistic, freedom = 0.0, 0
    for at in np.flatnonzero(~none):
        want = 400 * outside[at] / outside[at].sum()
        have = np.bincount(tails[:, at], minlength=VOCAB)
        assert have[want == 0].sum() == 0
        common = want >= 8
        cells = np.append(want[common], want[~common].sum())
        counts = np.append(have[common], have[~common].sum())
        full = cells > 0
        statistic += (((counts - cells) ** 2)[full] / cells[full]).sum()
        freedom += int(full.sum()) - 1
    p = float(chi2.sf(statistic, freedom))
    print(f"tails: p = {p:.3g} with {freedom} degrees of freedom")
    assert freedom > 15
    assert p > ALARM
    again = score(served, tokens, range(3), k=2)
    np.testing.assert_array_equal(np.stack([one.tail_ids for one in again]), tails[:3])


def test_long_texts_are_scored_by_parts(served: Served) -> None:
    """Together with running responses, so that the parts are cut differently each time."""
    served.install(served.old)
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, VOCAB, n).astype(np.int32) for n in (390, 129, 127, 250, 60, 1)]
    sampling = SamplingParams(1, top_k_logprobs=4)
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
        best = -np.sort(-logprobs, axis=1)[:, :4]
        np.testing.assert_allclose(one.topk_logprobs, best, atol=1e-3)
        assert (one.tail_ids[:, None] != one.topk_ids).all()


def test_where_all_is_listed_there_is_no_tail(served: Served) -> None:
    served.install(served.old)
    short = SamplingParams(1, top_k_logprobs=4, top_p=0.3)
    one = served.call(served.engine.score([ScoreRequest("s", PROMPT, PROMPT, short)]))[0]
    logprobs = reference(served.old, np.concatenate([PROMPT, PROMPT])[None], top_p=0.3)[0, 2:-1]
    few = ((logprobs > -np.inf).sum(-1) <= 4).numpy()
    assert few.any()
    assert (one.tail_ids[few] == -1).all()
    assert one.tail_ids.shape == one.tail_logprobs.shape == (3,)
