"""With drafting, the torch engine samples from the model's distribution: chi-square over sequences.

Every response of at most four tokens is a cell of the enumerated distribution. `false_alarms` says
which p-value fails. Seeds are fixed, so a run either always passes or always fails.
"""

from __future__ import annotations

from dataclasses import replace

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
    sample,
    slots_with,
)
from false_alarms import Claims, is_caught
from tiny_models import VOCAB
from tree_sources import CorruptTrees, RandomTrees

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache

pytestmark = [pytest.mark.slow, pytest.mark.statistics]

SAMPLES = 1500
MANY = 3000
"""That show mutants: without min-p, p = 5e-8."""
CLAIMS = Claims(__file__)

EVERY_TRUNCATION = Case(temperature=1.3, top_k=6, top_p=0.85, min_p=0.3)
MUTANTS = {
    "no top-k": replace(EVERY_TRUNCATION, top_k=0),
    "a larger top-k": replace(EVERY_TRUNCATION, top_k=7),
    "no min-p": replace(EVERY_TRUNCATION, min_p=0.0),
    "no top-p": replace(EVERY_TRUNCATION, top_p=1.0),
    "top-p without rescaling": replace(EVERY_TRUNCATION, top_p=0.8),
}
WRONG_STOPS = {
    "none": Case(),
    "only éa": Case(stop=STRINGS[1:]),
    "one of the string's beginnings": Case(stop=("ba", "éa")),
}
"""What wrong engines would sample from; the comparison must detect each."""

CASES = {
    "cache": Case(),
    "cache, cold": Case(temperature=0.6),
    "cache, hot": Case(temperature=1.5),
    "cache, top-p": Case(top_p=0.7),
    "cache, hot and top-p": Case(temperature=1.3, top_p=0.9),
    "cache, top-k, top-p and min-p": EVERY_TRUNCATION,
    "cache, stop strings": Case(stop=STRINGS),
    "unrelated policy": Case(drift=1.0),
}


@pytest.mark.parametrize(
    ("name", "trees"),
    [(name, False) for name in CASES]
    + [
        (name, True)
        for name in (
            "cache",
            "cache, top-k, top-p and min-p",
            "cache, stop strings",
            "unrelated policy",
        )
    ],
)
def test_drafts_of_another_policy_do_not_change_the_distribution(
    tiny_qwen3: str, name: str, trees: bool
) -> None:
    torch.set_num_threads(1)
    case = CASES[name]
    old, new = policies(case.drift)
    distribution = enumerate_distribution(new, case)
    cache = RolloutCache(CacheConfig(max_bytes=1 << 22, min_match=1, min_probability=0.0))
    model = slots_with(tiny_qwen3, old)
    earlier = sample(core_of(model, cache), case, 400, first_seed=10**6)
    model.module.load_state_dict(new.state_dict())
    core = core_of(model, cache, draft_trees=trees, max_draft_tokens=8 if trees else 4)
    # Earlier continuations come first, as chains. With trees, all drafts come from the cache.
    old = None if trees else [np.array(t, np.int32) for t in earlier]
    mutants = {EVERY_TRUNCATION: MUTANTS, CASES["cache, stop strings"]: WRONG_STOPS}
    wrong = {} if trees else mutants.get(case, {})
    generated = sample(core, case, MANY if wrong else SAMPLES, 0, old)
    drafted = core.stats()
    assert drafted.tokens.drafted > SAMPLES / 2
    assert 0 < drafted.tokens.accepted < drafted.tokens.drafted
    assert CLAIMS.fit(p_value(generated, distribution))
    for what, mutant in wrong.items():
        assert is_detected(generated, enumerate_distribution(new, mutant)), what


@pytest.mark.parametrize("kind", [RandomTrees, CorruptTrees])
def test_trees_of_an_adversary_do_not_change_the_distribution(
    tiny_qwen3: str, kind: type[RandomTrees]
) -> None:
    """Random trees, and sources that break every rule of a tree: only speed may suffer."""
    torch.set_num_threads(1)
    _, new = policies(0.3)
    core = core_of(slots_with(tiny_qwen3, new), kind(VOCAB), max_draft_tokens=8)
    generated = sample(core, Case(), SAMPLES, 0)
    assert core.stats().tokens.drafted > SAMPLES / 5
    assert core.stats().tokens.accepted > SAMPLES / 50
    assert CLAIMS.fit(p_value(generated, enumerate_distribution(new, Case())))


def test_the_test_can_fail(tiny_qwen3: str) -> None:
    """Power: samples of the old policy are distinguished from the new policy's distribution."""
    torch.set_num_threads(1)
    old, new = policies(0.3)
    generated = sample(core_of(slots_with(tiny_qwen3, old), None), Case(), 1000, 0)
    assert is_caught(p_value(generated, enumerate_distribution(new, Case())))
