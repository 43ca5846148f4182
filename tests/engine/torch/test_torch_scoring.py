"""Log-probabilities of given tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch_cores import PROMPT, core_of, joined, load, mixed_requests, run, tokens_of

from asyncrl.engine.protocol import SamplingParams, ScoreRequest

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
