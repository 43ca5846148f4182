"""Log-probabilities of given tokens, and the tail draws that come with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_models import VOCAB
from torch_cores import PROMPT, core_of, joined, load, mixed_requests, run, tokens_of

from engine.protocol import SamplingParams, ScoreRequest

NONE = np.empty(0, np.int32)


@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_llama"])
def test_score_follows_the_sampling_distribution(
    family: str, request: pytest.FixtureRequest
) -> None:
    model = load(request.getfixturevalue(family))
    core = core_of(model)
    requests = [
        replace(r, sampling=replace(r.sampling, top_p=0.8 if i % 4 == 0 else 1.0))
        for i, r in enumerate(mixed_requests())
    ]
    chunks = run(core, requests)
    asked = [
        ScoreRequest(
            r.request_id,
            r.prompt_tokens,
            np.array(tokens_of(chunks[r.request_id]), np.int32),
            r.sampling,
        )
        for r in requests
    ]
    asked.append(ScoreRequest("nothing", PROMPT, NONE, SamplingParams(4, top_k_logprobs=4)))
    for r, score in zip(asked, core.score(asked), strict=True):
        assert score.request_id == r.request_id
        assert score.topk_ids.shape == (len(r.tokens), 4)
        if r.request_id == "nothing":
            continue
        drawn = chunks[r.request_id]
        np.testing.assert_allclose(score.logprobs, joined(drawn, "logprobs"), atol=1e-4)
        np.testing.assert_allclose(score.topk_logprobs, joined(drawn, "topk_logprobs"), atol=1e-4)
        assert not (score.tail_ids[:, None] == score.topk_ids)[score.tail_ids >= 0].any()
        listed = np.exp(score.topk_logprobs).sum(axis=1)
        assert (np.exp(score.tail_logprobs) <= 1 - listed + 1e-5).all()
        assert (np.isneginf(score.tail_logprobs) == (score.tail_ids < 0)).all()


def test_tail_draws_depend_on_seed_version_and_position(tiny_qwen3: str) -> None:
    """The same request gets the same draws; with the whole vocabulary listed nothing is outside."""
    core = core_of(load(tiny_qwen3), top_k=VOCAB)
    text = np.arange(9, dtype=np.int32)

    def tails(seed: int, k: int = 2) -> list[int]:
        asked = ScoreRequest("a", PROMPT, text, SamplingParams(9, top_k_logprobs=k, seed=seed))
        [score] = core.score([asked])
        return score.tail_ids.tolist()

    assert tails(1) == tails(1) != tails(2)
    assert tails(1, k=VOCAB) == [-1] * 9
    assert -1 not in tails(1, k=0)
    before = tails(1)
    core.policy_version += 1
    assert tails(1) != before
    unseeded = ScoreRequest("a", PROMPT, text, SamplingParams(9, top_k_logprobs=2))
    [one], [other] = core.score([unseeded]), core.score([unseeded])
    assert one.tail_ids.tolist() != other.tail_ids.tolist()
