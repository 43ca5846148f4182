"""What is drawn after a rejection has nothing in common with the old text that was rejected.

By block, how much of a text is kept depends on tokens *after* the first rejected one. With the
seed that drew the text, a verification would draw new tokens with the numbers that drew those,
which biases them (docs/exactness.md) and repeats them. The repetition is much easier to see.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from enumerated_policies import (
    Case,
    Distribution,
    core_of,
    enumerate_distribution,
    policies,
    request,
    slots_with,
    text_of,
)
from false_alarms import Claims, coincidence, is_caught
from new_weights import swap_weights
from tiny_models import VOCAB
from torch_cores import joined, kept_of, run

from asyncrl.engine.protocol import TokenChunk
from asyncrl.rollout.trajectory import KeptTokens, Provenance

SAMPLES, NEW_SEEDS = 1200, 10**7
CLAIMS = Claims(__file__)
CASE = Case(temperature=2.0, drift=0.3)
WIDE = {"max_step_tokens": 2000, "max_prefill_tokens": 2000}


def masses(distribution: Distribution) -> Distribution:
    """Probability that a response begins with a text, for every text."""
    out: Distribution = {}
    for text, mass in distribution.items():
        for end in range(len(text) + 1):
            out[text[:end]] = out.get(text[:end], 0.0) + mass
    return out


def repetitions(
    old: Sequence[KeptTokens], new: Sequence[Sequence[TokenChunk]], begins: Distribution
) -> tuple[int, list[float]]:
    """How many tokens after the one in place of the first rejected equal the old token there.

    Also the probability of each under the current policy, given the new text before it.
    """
    again, chances = 0, []
    for kept, chunks in zip(old, new, strict=True):
        text, before = text_of(chunks), tuple(kept.tokens.tolist())
        accepted = int((joined(chunks, "provenance") == Provenance.VERIFIED).sum())
        for at in range(accepted + 1, min(len(text), len(before))):
            again += text[at] == before[at]
            chances.append(begins.get((*text[:at], before[at]), 0.0) / begins[text[:at]])
    return again, chances


@pytest.mark.parametrize("top_k", [5, VOCAB], ids=["K = 5", "all tokens known"])
def test_verification_with_the_seed_that_drew_the_text_is_detected(
    tiny_qwen3: str, top_k: int
) -> None:
    torch.set_num_threads(1)
    old, new = policies(CASE.drift)
    model = slots_with(tiny_qwen3, old, slots=200)
    asked = [request(CASE, f"{i}", i, top_k=top_k) for i in range(SAMPLES)]
    texts = [
        kept_of(chunks) for chunks in run(core_of(model, None, top_k=top_k, **WIDE), asked).values()
    ]
    core = core_of(model, None, top_k=top_k, **WIDE)
    swap_weights(core, new.state_dict().items(), 1)
    begins = masses(enumerate_distribution(new, CASE))

    def verified_with(first_seed: int) -> float:
        requests = [
            request(CASE, f"{i}", first_seed + i, top_k=top_k, kept=kept)
            for i, kept in enumerate(texts)
        ]
        again, chances = repetitions(texts, list(run(core, requests).values()), begins)
        assert len(chances) > SAMPLES / 10, "hardly anything was rejected"
        return coincidence(again, chances)

    assert CLAIMS.fit(verified_with(NEW_SEEDS))
    assert is_caught(verified_with(0))
