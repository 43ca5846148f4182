"""The processed distribution and the seeded streams, which `false_alarms` judges (fixed seeds)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from enumerated_policies import truncated
from false_alarms import Claims
from scipy import stats
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.sampling.truncation import (
    Purpose,
    SamplingColumns,
    forked,
    processed_logprobs,
    uniforms,
)

CLAIMS = Claims(__file__)


def columns_of(*settings: dict[str, float]) -> SamplingColumns:
    """A row for each."""
    return SamplingColumns.of([SamplingParams(1, **row) for row in settings])  # type: ignore[arg-type]


def processed(probabilities: list[float], **settings: float) -> np.ndarray:
    """One distribution, truncated."""
    logits = torch.tensor([probabilities]).log()
    return processed_logprobs(logits, columns_of(settings))[0].exp().numpy()


def test_uniforms_look_uniform_over_seeds_and_positions() -> None:
    n = 1 << 16
    along_seeds = uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64))
    along_positions = uniforms(np.zeros(n, np.uint64), np.arange(n))
    same_sum = uniforms(np.arange(n, dtype=np.uint64), np.arange(n)[::-1].copy())
    for numbers in (along_seeds, along_positions, same_sum):
        assert numbers.min() > 0
        assert numbers.max() < 1
        counts = np.histogram(numbers, 256, (0, 1))[0]
        assert CLAIMS.fit(stats.chisquare(counts).pvalue)
        pairs = np.histogram2d(numbers[:-1:2], numbers[1::2], 16, [(0, 1), (0, 1)])[0]
        assert CLAIMS.fit(stats.chisquare(pairs.ravel()).pvalue)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1.0, 4), (0.9, 3), (0.81, 3), (0.79, 2), (0.51, 2), (0.49, 1), (0.01, 1)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    probabilities = np.array([0.05, 0.5, 0.15, 0.3])
    out = processed(probabilities.tolist(), top_p=top_p)
    order = np.argsort(-probabilities)[:kept]
    expected = np.zeros(4)
    expected[order] = probabilities[order] / probabilities[order].sum()
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_a_mass_that_is_0_in_float32_keeps_the_most_probable_token() -> None:
    np.testing.assert_array_equal(processed([0.2, 0.5, 0.3], top_p=1e-46), [0, 1, 0])


def test_no_row_has_nothing_to_truncate() -> None:
    nothing = processed_logprobs(torch.empty(0, 4), columns_of())
    assert nothing.shape == (0, 4)
    unsliced = columns_of({"top_p": 0.5}, {"top_p": 0.5})
    assert processed_logprobs(torch.empty(0, 4), unsliced).shape == (0, 4)


def test_rows_have_their_own_settings() -> None:
    values = itertools.product((1.0, 0.5, 2.0), (0, 2, 5, 40), (1.0, 0.5), (0.0, 0.4))
    names = ("temperature", "top_k", "top_p", "min_p")
    settings = [dict(zip(names, row, strict=True)) for row in values]
    logits = torch.randn(len(settings), 9, generator=torch.Generator().manual_seed(0))
    together = processed_logprobs(logits.clone(), columns_of(*settings))
    for i, row in enumerate(settings):
        alone = processed_logprobs(logits[i : i + 1].clone(), columns_of(row))
        torch.testing.assert_close(together[i], alone[0])
        chances = torch.softmax(logits[i].double() / row["temperature"], -1).numpy()
        want = truncated(chances, row["top_k"], row["top_p"], row["min_p"])  # type: ignore[arg-type]
        np.testing.assert_allclose(together[i].exp().numpy(), want, atol=1e-6)


def test_the_truncations_apply_in_the_stated_order() -> None:
    chances = [0.4, 0.25, 0.2, 0.1, 0.05]
    # Of the four best, rescaled by 1/0.95, the first two have 0.684 and the first three 0.895.
    np.testing.assert_allclose(
        processed(chances, top_k=4, top_p=0.68), [0.4 / 0.65, 0.25 / 0.65, 0, 0, 0], atol=1e-6
    )
    # After min-p, the three that are left would reach 0.76 of their mass with two.
    np.testing.assert_allclose(
        processed(chances, top_p=0.76, min_p=0.3),
        [0.4 / 0.85, 0.25 / 0.85, 0.2 / 0.85, 0, 0],
        atol=1e-6,
    )
    np.testing.assert_allclose(
        processed(chances, top_k=3, min_p=0.51), [0.4 / 0.65, 0.25 / 0.65, 0, 0, 0], atol=1e-6
    )


def test_ties_at_the_edge_of_top_k_stay_and_at_the_edge_of_top_p_the_lower_id_does() -> None:
    chances = [0.2, 0.3, 0.2, 0.2, 0.1]
    np.testing.assert_allclose(
        processed(chances, top_k=2), np.array([2, 3, 2, 2, 0]) / 9, atol=1e-6
    )
    np.testing.assert_allclose(processed(chances, top_p=0.45), [0.4, 0.6, 0, 0, 0], atol=1e-6)
    assert (processed([0.5, 0.5, 0.0], min_p=1.0) > 0).tolist() == [True, True, False]


def test_top_k_alone_is_hugging_faces() -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    for k, p, m in ((7, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (12, 0.8, 0.1)):
        want = logits
        if k:
            want = TopKLogitsWarper(k)(None, want)
        if p < 1:
            want = TopPLogitsWarper(p)(None, want)
        if m:
            want = MinPLogitsWarper(m)(None, want)
        got = processed_logprobs(
            logits.clone(), columns_of(*[{"top_k": k, "top_p": p, "min_p": m}] * 50)
        )
        torch.testing.assert_close(got, torch.log_softmax(want, -1), atol=1e-5, rtol=0)


def test_streams_of_one_seed_share_nothing() -> None:
    """Drawing, accepting, residuals and tails, under two versions: each pair looks independent."""
    n = 1 << 14
    seeds = np.arange(n, dtype=np.uint64)
    streams = [seeds]
    streams += [forked(seeds, purpose, version) for purpose in Purpose for version in (0, 7)]
    assert len(np.unique(np.concatenate(streams))) == len(streams) * n
    numbers = [uniforms(stream, np.full(n, 3)) for stream in streams]
    for i, one in enumerate(numbers):
        for other in numbers[:i]:
            pairs = np.histogram2d(one, other, 8, [(0, 1), (0, 1)])[0]
            assert CLAIMS.fit(stats.chisquare(pairs.ravel()).pvalue)
            assert not np.isin(one, other).any()
    assert (forked(seeds, Purpose.TAIL, -1) != forked(seeds, Purpose.TAIL, 2**64 - 2)).all()
