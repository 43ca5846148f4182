"""The processed distribution, the seeded streams, and draws from both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from engine import sampling
from engine.sampling import Purpose, draw, draw_outside, forked, processed_logprobs, top_k, uniforms


def ones(n: int) -> np.ndarray:
    return np.ones(n, np.float32)


def test_uniforms_look_uniform_over_seeds_and_positions() -> None:
    """Each p-value below 1e-6 fails: false alarms in at most 6 runs of a million, seeds fixed."""
    n = 1 << 16
    along_seeds = uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64))
    along_positions = uniforms(np.zeros(n, np.uint64), np.arange(n))
    same_sum = uniforms(np.arange(n, dtype=np.uint64), np.arange(n)[::-1].copy())
    for numbers in (along_seeds, along_positions, same_sum):
        assert numbers.min() > 0
        assert numbers.max() < 1
        counts = np.histogram(numbers, 256, (0, 1))[0]
        assert stats.chisquare(counts).pvalue > 1e-6
        pairs = np.histogram2d(numbers[:-1:2], numbers[1::2], 16, [(0, 1), (0, 1)])[0]
        assert stats.chisquare(pairs.ravel()).pvalue > 1e-6


def test_extreme_numbers_never_draw_a_token_without_mass() -> None:
    logits = torch.tensor([[-np.inf, 0.0, -np.inf, 0.0, -np.inf]]).repeat(3, 1)
    numbers = np.array([2.0**-51, 0.5, 1 - 2.0**-51])
    assert draw(torch.log_softmax(logits, -1), numbers).tolist() == [1, 3, 3]


def test_draws_follow_the_distribution() -> None:
    n = 40_000
    logits = torch.tensor([1.5, -0.3, 0.2, -2.0, 0.9]).repeat(n, 1)
    logprobs = processed_logprobs(logits.clone(), ones(n) * 0.7, ones(n))
    expected = torch.softmax(logits[0] / 0.7, -1).double().numpy()
    seeds = np.arange(n, dtype=np.uint64)
    counts = np.bincount(draw(logprobs, uniforms(seeds, np.full(n, 3))).numpy(), minlength=5)
    assert stats.chisquare(counts, expected / expected.sum() * n).pvalue > 1e-6


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1.0, 4), (0.9, 3), (0.81, 3), (0.79, 2), (0.51, 2), (0.49, 1), (0.01, 1)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    probabilities = np.array([0.05, 0.5, 0.15, 0.3])
    logits = torch.from_numpy(np.log(probabilities).astype(np.float32))[None].clone()
    out = processed_logprobs(logits, ones(1), ones(1) * np.float32(top_p))[0].exp().numpy()
    order = np.argsort(-probabilities)[:kept]
    expected = np.zeros(4)
    expected[order] = probabilities[order] / probabilities[order].sum()
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_rows_have_their_own_settings() -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    temperature = np.array([1, 0.5, 2, 1, 0.5, 2], np.float32)
    top_p = np.array([1, 1, 1, 0.5, 0.5, 0.5], np.float32)
    together = processed_logprobs(logits.clone(), temperature, top_p)
    for i in range(6):
        alone = processed_logprobs(
            logits[i : i + 1].clone(), temperature[i : i + 1], top_p[i : i + 1]
        )
        torch.testing.assert_close(together[i], alone[0])


def test_top_k_is_padded_where_the_vocabulary_ends() -> None:
    ids, values = top_k(torch.log_softmax(torch.tensor([[1.0, 2.0]]), -1), 3)
    assert ids.tolist() == [[1, 0, -1]]
    assert np.isneginf(values[0, 2])


def test_streams_of_one_seed_share_nothing() -> None:
    """Drawing, accepting, residuals and tails, under two versions: each pair looks independent.

    Each p-value below 1e-6 fails: false alarms in at most 15 runs of a million, seeds fixed.
    """
    n = 1 << 14
    seeds = np.arange(n, dtype=np.uint64)
    streams = [seeds]
    streams += [forked(seeds, purpose, version) for purpose in Purpose for version in (0, 7)]
    assert len(np.unique(np.concatenate(streams))) == len(streams) * n
    numbers = [uniforms(stream, np.full(n, 3)) for stream in streams]
    for i, one in enumerate(numbers):
        for other in numbers[:i]:
            pairs = np.histogram2d(one, other, 8, [(0, 1), (0, 1)])[0]
            assert stats.chisquare(pairs.ravel()).pvalue > 1e-6
            assert not np.isin(one, other).any()
    assert (forked(seeds, Purpose.TAIL, -1) != forked(seeds, Purpose.TAIL, 2**64 - 2)).all()


def test_draws_outside_follow_the_rest_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_SLAB", 5000)  # in several pieces
    n = 20_000
    logprobs = torch.log_softmax(torch.tensor([1.5, -0.3, 0.2, -2.0, 0.9, -torch.inf]), 0)
    known = np.array([[0, 3], [4, -1], [-1, -1]], np.int32)[np.arange(n) % 3]
    ids, values = draw_outside(
        logprobs.repeat(n, 1), known, uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64))
    )
    np.testing.assert_allclose(values, logprobs.numpy()[ids], atol=1e-6)
    for kind in range(3):
        rest = logprobs.exp().double().numpy().copy()
        rest[[i for i in known[kind] if i >= 0]] = 0
        counts = np.bincount(ids[kind::3], minlength=6)
        assert not counts[rest == 0].any()
        there = rest > 0
        expected = rest[there] / rest.sum() * counts.sum()
        assert stats.chisquare(counts[there], expected).pvalue > 1e-6


def test_nothing_is_drawn_where_nothing_is_left() -> None:
    logprobs = torch.log(torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]))
    known = np.array([[0, 1], [2, 1]], np.int32)
    ids, values = draw_outside(logprobs, known, np.array([0.3, 0.999]))
    assert ids.tolist() == [-1, 0]
    assert values[0] == -np.inf
