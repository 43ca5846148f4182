"""What the tests of real SGLang look at shows what may go wrong inside it.

The engine of tests/engine/remote, told to do something wrong (`sglang_faults`). Each check is shown
to pass without a fault: a right engine fails the comparison of distributions with the probability
of `false_alarms`, and none of the others. KV of older weights is
`test_one_salt_for_all_versions_is_seen`, a pause that leaves a step `test_sglang_worker.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from false_alarms import Claims, is_caught
from served_engine import Served, ask, chi_square, collect_all, enumerated, kept_of, tokens_of
from served_sglang import REAL_SGLANG, call_worker, fault

from asyncrl.engine.protocol import GenerateRequest
from asyncrl.rollout.trajectory import IntArray

pytestmark = REAL_SGLANG

CLAIMS = Claims(__file__)
TOKENS = 3
N = 600
"""Of a p-value. In two samples each, every mutant below had p < 1e-170."""


@pytest.fixture(scope="module")
def served(served_by_sglang: Served) -> Served:
    served_by_sglang.install(served_by_sglang.new)
    return served_by_sglang


def p_value(served: Served) -> float:
    """Of many drafted responses to one prompt; most of their drafts are siblings' tokens."""
    before = served.meter.drafted
    found = served.call(
        collect_all(
            served.engine,
            [ask(f"p{i}", cache_key="p", max_tokens=TOKENS, seed=(7 << 32) + i) for i in range(N)],
        )
    )
    assert served.meter.drafted - before > N / 2
    tokens = np.stack([tokens_of(chunks) for chunks in found])
    return chi_square(tokens, enumerated(served.new, TOKENS))


def texts(served: Served, key: str) -> list[IntArray]:
    """Some responses, drafted from each other if they have a key."""
    asked: list[GenerateRequest] = [
        ask(f"t{i}", cache_key=key, max_tokens=40, seed=i) for i in range(24)
    ]
    return [tokens_of(chunks).tolist() for chunks in served.call(collect_all(served.engine, asked))]


def test_the_distribution_is_right_without_a_fault(served: Served) -> None:
    assert CLAIMS.fit(p_value(served))


@pytest.mark.parametrize("kind", ["argmax", "padded", "one place"])
def test_the_distribution_shows(served: Served, kind: str) -> None:
    """The most probable token committed, twins in SGLang's own rule, seeds that know no place."""
    with fault(served, kind):
        assert is_caught(p_value(served))


def test_sglangs_rule_is_right_for_trees_without_twins(served: Served) -> None:
    """So it is the twins that the test above has seen."""
    with fault(served, "sglang's rule"):
        assert CLAIMS.fit(p_value(served))


@pytest.mark.parametrize("kind", ["none", "argmax", "padded", "shifted seeds"])
def test_equal_tokens_with_and_without_drafts_show(served: Served, kind: str) -> None:
    """Draws that drafts change, though their distribution may be right."""
    plain = texts(served, "")
    before = served.meter.accepted
    with fault(served, kind):
        drafted = [texts(served, kind), texts(served, kind)]
    assert served.meter.accepted - before > 100
    assert (drafted == [plain, plain]) == (kind == "none")


@pytest.mark.parametrize("kind", ["none", "remembers"])
def test_the_drafter_forgets_requests_that_end_in_their_prefill(served: Served, kind: str) -> None:
    """SGLang tells it of ends in decode steps only."""
    kept = kept_of(served.call(collect_all(served.engine, [ask("long", max_tokens=9)]))[0])
    with fault(served, kind):
        one = [ask(f"one{i}", cache_key="one", max_tokens=1) for i in range(20)]
        served.call(collect_all(served.engine, one))
        checked = [ask(f"v{i}", max_tokens=9, kept=kept) for i in range(5)]
        served.call(collect_all(served.engine, checked))
    served.call(collect_all(served.engine, [ask("last", max_tokens=3)]))
    served.install(served.new)  # what has ended is settled before
    assert (not call_worker(served, "asyncrl_drafted_for")) == (kind == "none")
