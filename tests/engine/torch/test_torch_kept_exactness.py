"""Verified and resumed responses follow the current policy's distribution: chi-square.

An old policy generates responses. The current policy, which has drifted away, verifies and resumes
them. Over fresh old responses and fresh seeds, the results must follow the current policy's
distribution, which is enumerated. `false_alarms` says which p-value fails. Seeds are fixed: a run
always passes or always fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from enumerated_policies import (
    STRINGS,
    Case,
    core_of,
    enumerate_distribution,
    is_detected,
    p_value,
    policies,
    request,
    sample,
    slots_with,
    text_of,
    total_variation,
)
from false_alarms import Claims, is_caught
from new_weights import swap_weights
from tiny_models import VOCAB
from torch_cores import first, kept_of, run
from tree_sources import RandomTrees

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.torch.core import DecodeCore
from asyncrl.engine.torch.model import SlotModel
from asyncrl.rollout.trajectory import KeptTokens, Provenance

pytestmark = [pytest.mark.slow, pytest.mark.statistics]

SAMPLES = 1500
"""The most exact of the wrong rules, lenience 1, has a p-value of 7e-14."""
CLAIMS = Claims(__file__)
DRIFT = 0.5
"""Of most cases: half of what is kept is rejected, so that few samples show a wrong rule."""
NEW_SEEDS = 10**7
WIDE = {"max_step_tokens": 2000, "max_prefill_tokens": 2000}
"""Many rows at a time, so that the tests are quick."""


@dataclass(frozen=True)
class Reuse:
    """How much of the old responses is kept, and what else drafts."""

    case: Case
    top_k: int = 3
    max_kept: int = 9
    """Largest number of kept tokens per response."""
    drafts: str = "none"
    every: int = 1
    """Every such request has kept tokens; the others are ordinary ones in the same steps."""
    drawn_with: Case | None = None
    """How the old responses were sampled; None: as the new ones are."""


REUSES = {
    "three of ten known": Reuse(Case(drift=DRIFT)),
    "hot and top-p": Reuse(Case(temperature=1.3, top_p=0.85, drift=DRIFT)),
    "all of top-k known": Reuse(Case(temperature=1.3, top_k=3, min_p=0.2, drift=DRIFT)),
    "stop strings, in what is kept": Reuse(
        Case(stop=STRINGS, drift=DRIFT), top_k=5, drawn_with=Case(drift=DRIFT), drafts="cache"
    ),
    "unrelated policy": Reuse(Case(drift=1.0)),
    "cut off, with trees of the cache": Reuse(Case(drift=DRIFT), max_kept=2, drafts="cache"),
    "among ordinary requests, with random trees": Reuse(
        Case(drift=DRIFT), drafts="random", every=2
    ),
}


def old_texts(model: SlotModel, reuse: Reuse, count: int) -> list[KeptTokens]:
    core = core_of(model, None, top_k=reuse.top_k, **WIDE)
    case = reuse.drawn_with or reuse.case
    asked = [request(case, f"{i}", i, top_k=reuse.top_k) for i in range(count)]
    return [first(kept_of(chunks), reuse.max_kept) for chunks in run(core, asked).values()]


def resumed(
    core: DecodeCore, reuse: Reuse, texts: list[KeptTokens]
) -> tuple[list[tuple[int, ...]], int]:
    """The resumed response of each text, and how many old tokens were accepted."""
    asked = [
        request(
            reuse.case,
            f"{i}",
            NEW_SEEDS + i,
            kept=None if i % reuse.every else kept,
            top_k=reuse.top_k,
        )
        for i, kept in enumerate(texts)
    ]
    done = run(core, asked)
    verified = sum(
        int((chunk.provenance == Provenance.VERIFIED).sum())
        for chunks in done.values()
        for chunk in chunks
    )
    return [text_of(chunks) for chunks in done.values()], verified


@pytest.mark.parametrize("name", list(REUSES))
def test_verified_and_resumed_responses_follow_the_current_policy(
    tiny_qwen3: str, name: str
) -> None:
    torch.set_num_threads(1)
    reuse = REUSES[name]
    old, new = policies(reuse.case.drift)
    model = slots_with(tiny_qwen3, old)
    texts = old_texts(model, reuse, SAMPLES)
    source = {
        "none": None,
        "cache": RolloutCache(CacheConfig(max_bytes=1 << 22, min_match=1, min_probability=0.0)),
        "random": RandomTrees(VOCAB),
    }[reuse.drafts]
    core = core_of(model, source, max_draft_tokens=8, top_k=reuse.top_k, **WIDE)
    if source is not None:
        sample(core, reuse.case, 300, first_seed=10**8)
    swap_weights(core, new.state_dict().items(), 1)
    generated, verified = resumed(core, reuse, texts)
    assert verified > SAMPLES / 10
    assert verified < sum(map(len, texts)) / reuse.every
    assert CLAIMS.fit(p_value(generated, enumerate_distribution(new, reuse.case)))
    if reuse.case.top_k:
        wrong = enumerate_distribution(new, replace(reuse.case, top_k=4))
        assert is_detected(generated, wrong)
        assert all((kept.topk_ids == kept.tokens[:, None]).any(axis=1).all() for kept in texts)


def test_lenient_responses_do_not_and_the_test_detects_it(tiny_qwen3: str) -> None:
    """SPEC-RL's rule is biased, more so with more lenience; the comparison above detects it."""
    torch.set_num_threads(1)
    reuse = REUSES["three of ten known"]
    old, new = policies(reuse.case.drift)
    model = slots_with(tiny_qwen3, old)
    texts = old_texts(model, reuse, SAMPLES)
    core = core_of(model, None, top_k=reuse.top_k, **WIDE)
    swap_weights(core, new.state_dict().items(), 1)
    distribution = enumerate_distribution(new, reuse.case)
    away, kept = [], []
    for lenience in (None, 1.0, float(np.exp(0.5))):
        lenient = [replace(text, lenience=lenience) for text in texts]
        generated, verified = resumed(core, reuse, lenient)
        away.append(total_variation(generated, distribution))
        kept.append(verified)
        if lenience is not None:
            assert is_caught(p_value(generated, distribution)), lenience
    assert away[0] < away[1] < away[2]
    assert kept[1] < kept[2]
