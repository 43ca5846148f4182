"""A real vLLM with two tensor-parallel ranks, on a CPU: what it samples, and what it decodes with.

The two ranks are an engine of their own. p-values below 1e-6 fail. There are 3, and a right engine
fails one of them once in 300,000 runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from served_engine import (
    WAYS,
    Served,
    ask,
    chi_square,
    collect_all,
    drawn,
    enumerated,
    logprobs_of,
    tokens_of,
    verified,
)
from served_vllm import REAL_VLLM, serving

from asyncrl.wire.records.wrong_policy import compare_weights, not_compared
from asyncrl.wire.weights.fingerprint import fingerprint

pytestmark = [*REAL_VLLM, pytest.mark.slow]
LENGTH, RESPONSES, ALPHA = 3, 1200, 1e-6


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("vllm-tp"), tensor_parallel_size=2) as running:
        yield running


def responses_of(served: Served, requests: list[Any]) -> np.ndarray:
    return np.array([tokens_of(one) for one in served.call(collect_all(served.engine, requests))])


def test_two_ranks_install_and_show_the_weights_of_the_trainer(
    two_ranks: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Every tensor, each rank its part; a mistake in one tensor is found."""
    for model in (two_ranks.new, two_ranks.old, two_ranks.new, two_ranks.old):
        version = two_ranks.install(model)
        expected = fingerprint(model.state_dict(keep_vars=True).items())
        found = two_ranks.call(two_ranks.engine.fingerprint())
        assert not_compared(expected, found) == []
        assert compare_weights("g", version, expected=expected, found=found) is None
        other = two_ranks.old if model is two_ranks.new else two_ranks.new
        wrong = fingerprint(other.state_dict(keep_vars=True).items())
        assert compare_weights("g", version, expected=wrong, found=found) is not None
    assert "loads new weights while it is paused" not in caplog.text, "every rank copies"


def test_two_ranks_sample_and_draft_exactly(two_ranks: Served) -> None:
    """Against the enumerated distribution, with drafts of all lengths, and under new weights."""
    for seed, model in enumerate((two_ranks.old, two_ranks.new)):
        two_ranks.install(model)
        requests = [
            ask(f"r{seed}.{i}", cache_key="tp", seed=(seed << 40) + i, max_tokens=LENGTH)
            for i in range(RESPONSES)
        ]
        before = two_ranks.engine.stats().tokens
        responses = responses_of(two_ranks, requests)
        after = two_ranks.engine.stats().tokens
        assert after.drafted > before.drafted
        assert after.accepted > before.accepted
        p = chi_square(responses, enumerated(model, LENGTH))
        print(f"policy {seed}: p = {p:.3g}")
        assert p > ALPHA
    one = two_ranks.call(collect_all(two_ranks.engine, [ask("lp", seed=5, max_tokens=20)]))[0]
    wanted = drawn(two_ranks.new, ask().prompt_tokens, tokens_of(one))
    np.testing.assert_allclose(logprobs_of(one), wanted, atol=2e-4)


def test_two_ranks_verify_exactly(two_ranks: Served) -> None:
    """Kept tokens of the old policy, judged and continued: the new policy's distribution."""
    _, done = verified(two_ranks, **WAYS[0])
    responses = np.array([tokens_of(chunks) for chunks in done])
    p = chi_square(responses, enumerated(two_ranks.new, responses.shape[1], **WAYS[0]))
    print(f"verified: p = {p:.3g}")
    assert p > ALPHA
