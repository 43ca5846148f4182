"""Responses of two turns with a random tool on real engines, by chi-square with their enumeration.

`false_alarms` says what a p-value fails.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from enumerated_policies import is_detected, p_value
from false_alarms import Claims
from served_engine import PROMPT, TOP_K, WAYS, Served, collect_all, reference
from two_turns import Chances, World, enumerate_responses, texts_of

from asyncrl.engine.protocol import GenerateRequest, SamplingParams, TokenChunk
from asyncrl.rollout.trajectory import Provenance

CLAIMS = Claims(__file__)
SAMPLES = 150
"""In 20 simulations of this size, those of the policy before had p < 1e-19."""


def chances(model: torch.nn.Module, how: dict[str, float]) -> Chances:
    def of(texts: np.ndarray) -> np.ndarray:
        prompts = np.broadcast_to(PROMPT, (len(texts), len(PROMPT)))
        tokens = np.concatenate([prompts, texts], axis=1)
        with torch.no_grad():
            return reference(model, tokens, **how)[:, -1].exp().numpy()

    return of


@pytest.mark.parametrize(("how", "limit"), [*((how, None) for how in WAYS), (WAYS[0], 2)])
def test_turns_follow_the_policy_that_judged_them_last(
    served: Served, how: dict[str, Any], limit: int | None
) -> None:
    """The policy changes in the middle of turns, to another one and back."""

    def ask(requests: list[GenerateRequest]) -> list[list[TokenChunk]]:
        return served.call(collect_all(served.engine, requests))

    sampling = SamplingParams(1, top_k_logprobs=TOP_K, max_turn_tokens=limit, **how)
    world = World(ask, sampling, PROMPT)
    served.install(served.old)
    samples = world.draw(world.begin(SAMPLES), limit=3)
    served.install(served.new)
    samples = world.verify(samples, limit=5)
    served.install(served.old)
    samples = world.verify(samples)
    wanted = enumerate_responses(chances(served.old, how), turn_limit=limit)
    p = p_value(texts_of(samples), wanted)
    kept = sum(one.builder.count(Provenance.VERIFIED) for one in samples)
    answers = sum(one.builder.count(Provenance.OBSERVED) for one in samples)
    print(f"{how}, {limit}: p = {p:.3g}, verified {kept}, observed {answers}")
    assert CLAIMS.fit(p)
    assert kept > SAMPLES / 5
    before = enumerate_responses(chances(served.new, how), turn_limit=limit)
    assert is_detected(texts_of(samples), before)
