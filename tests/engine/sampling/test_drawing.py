"""Draws in two stages, on a CPU and in tensor operations.

Counts are judged by chi-square (`false_alarms`). Seeds are fixed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from false_alarms import Claims
from scipy import stats

from asyncrl.engine.sampling import drawing
from asyncrl.engine.sampling.drawing import (
    Drawn,
    Streams,
    draw,
    draw_by_tensors,
    identify,
    identify_by_tensors,
    identify_elsewhere,
    noise_seeds,
    top_k,
)
from asyncrl.engine.sampling.truncation import stream_bits

CLAIMS = Claims(__file__)


def streams_of(seeds: np.ndarray, position: int = 3, version: int = 0) -> Streams:
    seeds = seeds.astype(np.uint64)
    return Streams(seeds, np.full(len(seeds), position), noise_seeds(seeds, version))


def rows_of(logits: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.log_softmax(logits, -1).repeat(rows, 1)


def lists(drawn: Drawn) -> tuple[list[list[int]], np.ndarray]:
    return drawn.listed.ids.tolist(), drawn.listed.logprobs.numpy()


LOGITS = {
    "sharp": torch.tensor([3.0, -0.3, 0.2, -2.0, 0.9, -1.0, 0.0, -3.0]),
    "flat": torch.zeros(8),
    "truncated": torch.tensor([1.5, -torch.inf, 0.2, -torch.inf, 0.9, -1.0, -torch.inf, -3.0]),
}


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("name", list(LOGITS))
def test_draws_follow_the_distribution(name: str, k: int) -> None:
    n = 60_000
    logprobs = rows_of(LOGITS[name], n)
    tokens = draw(logprobs, k, streams_of(np.arange(n))).tokens.numpy()
    expected = logprobs[0].double().exp().numpy()
    counts = np.bincount(tokens, minlength=8)
    assert (counts[expected == 0] == 0).all()
    there = expected > 0
    wanted = expected[there] / expected[there].sum() * n
    assert CLAIMS.fit(stats.chisquare(counts[there], wanted).pvalue)


def test_long_tails_are_followed_in_all_their_parts() -> None:
    """Thousands of tokens outside the list, with probabilities over eight orders of magnitude."""
    n, vocabulary = 40_000, 6000
    logits = torch.linspace(0, -18, vocabulary)[torch.randperm(vocabulary)]
    logprobs = torch.log_softmax(logits, -1)[None]
    keys = np.arange(n, dtype=np.uint64)
    ids = top_k(logprobs, 8).ids.numpy().repeat(n, 0)
    position = np.zeros(n, np.int64)
    tokens = identify(logprobs, np.zeros(n, np.int64), ids, position, keys)
    mass = logprobs[0].double().exp().numpy()
    mass[ids[0]] = 0
    order = np.argsort(-mass)
    parts = np.array_split(order, [1, 3, 10, 30, 100, 200, 300, 400, 500, 600, 800, 1100])
    counts = [np.isin(tokens, part).sum() for part in parts]
    expected = np.array([mass[part].sum() for part in parts])
    assert CLAIMS.fit(stats.chisquare(counts, expected / expected.sum() * n).pvalue)


@pytest.mark.parametrize(("vocabulary", "k"), [(5, 2), (64, 8), (300, 64), (1000, 1), (3, 7)])
def test_tensors_and_compiled_code_draw_the_same(vocabulary: int, k: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(2000, vocabulary, generator=generator) * 2
    logits[::7] = logits[::7].masked_fill(logits[::7] < 1, -torch.inf)
    logits[::7, 0] = 1.0
    logprobs = torch.log_softmax(logits, -1)
    streams = streams_of(np.arange(2000) + 10**12)
    kept = logprobs.clone()
    compiled, tensors = draw(logprobs, k, streams), draw_by_tensors(logprobs, k, streams)
    assert torch.equal(logprobs, kept), "rows are restored"
    assert torch.equal(compiled.tokens, tensors.tokens)
    assert torch.equal(compiled.listed.ids, tensors.listed.ids)
    assert torch.equal(compiled.listed.logprobs, tensors.listed.logprobs)
    in_tail = (compiled.listed.ids != compiled.tokens[:, None]).all(1)
    assert in_tail.any() or k >= vocabulary
    assert not in_tail[::7][(compiled.listed.ids[::7] < 0).any(1)].any(), "nothing is outside"


def test_slabs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logprobs = rows_of(torch.randn(50, generator=torch.Generator().manual_seed(0)), 300)
    streams = streams_of(np.arange(300))
    whole = draw_by_tensors(logprobs, 2, streams).tokens
    rows, ids = np.arange(299, -1, -3), top_k(logprobs, 2).ids.numpy()[::-3].copy()
    keys = stream_bits(streams.noise_seeds, streams.positions)[::-3].copy()
    names = identify(logprobs, rows, ids, streams.positions[rows], streams.noise_seeds[rows])
    monkeypatch.setattr(drawing, "_SLAB", 130)
    assert torch.equal(draw_by_tensors(logprobs, 2, streams).tokens, whole)
    assert identify_elsewhere(logprobs, rows, ids, keys).tolist() == names.tolist()


def test_lists_are_in_order_and_ties_go_to_the_lower_id() -> None:
    logprobs = torch.log(torch.tensor([[0.1, 0.3, 0.1, 0.3, 0.2, 0.0]]))
    ids, values = top_k(logprobs, 4)
    assert ids.tolist() == [[1, 3, 4, 0]]
    np.testing.assert_allclose(values.exp()[0], [0.3, 0.3, 0.2, 0.1], atol=1e-6)
    ids, values = top_k(logprobs, 7)
    assert ids.tolist() == [[1, 3, 4, 0, 2, -1, -1]]
    assert torch.isneginf(values[0, 5:]).all()
    ids, values = top_k(torch.log_softmax(torch.tensor([[1.0, 2.0]]), -1), 3)
    assert ids.tolist() == [[1, 0, -1]]
    assert torch.isneginf(values[0, 2])


def test_a_token_on_a_block_edge_is_found() -> None:
    for at in (0, 63, 64, 127, 128, 199):
        logprobs = torch.full((1, 200), -9.0)
        logprobs[0, at] = -0.1
        assert top_k(logprobs, 1).ids.tolist() == [[at]]


def test_some_rows_in_any_order() -> None:
    logprobs = torch.log_softmax(torch.randn(6, 40), -1)
    rows = np.array([4, 1, 4])
    streams = streams_of(np.array([7, 8, 9]))
    some = draw(logprobs, 3, streams, rows)
    alone = draw(logprobs[torch.from_numpy(rows)].clone(), 3, streams)
    assert torch.equal(some.tokens, alone.tokens)
    assert lists(some)[0] == lists(alone)[0]


@pytest.mark.parametrize("k", [2, 8])
@pytest.mark.parametrize("by_tensors", [False, True])
def test_what_is_not_finite_is_told(by_tensors: bool, k: int) -> None:
    """Also where no row before it was finite, so that nothing has been written anywhere."""
    logits = torch.zeros(4, 500)
    logits[0, 2] = torch.nan
    logits[1, 2] = torch.inf
    logits[3] = -torch.inf
    logprobs = torch.log_softmax(logits, -1)
    logprobs[1, ::2] = -torch.inf  # as truncation leaves it
    streams = streams_of(np.arange(4))
    drawn = draw_by_tensors(logprobs, k, streams) if by_tensors else draw(logprobs, k, streams)
    assert (drawn.tokens < 0).tolist() == [True, True, False, True]


def test_nothing_is_named_where_nothing_is_outside() -> None:
    logprobs = torch.log(torch.tensor([[0.5, 0.5, 0.0]]))
    zero = np.zeros(1, np.int64)
    seeds = np.ones(1, np.uint64)
    both = np.array([[0, 1]], np.int32)
    assert identify(logprobs, zero, both, zero, seeds).tolist() == [-1]
    one = np.array([[0, -1]], np.int32)
    assert identify(logprobs, zero, one, zero, seeds).tolist() == [1]
    assert identify_by_tensors(logprobs, torch.from_numpy(one), seeds).tolist() == [1]


def test_a_padded_place_leaves_token_0_alone() -> None:
    logprobs = rows_of(torch.tensor([4.0, 0.0, 0.0]), 100)
    padded = np.tile(np.array([1, -1], np.int32), (100, 1))
    keys = stream_bits(np.arange(100, dtype=np.uint64), np.zeros(100, np.int64))
    named = identify_by_tensors(logprobs, torch.from_numpy(padded), keys)
    assert (named == 0).float().mean() > 0.9


def test_a_policy_that_hardly_changed_makes_the_same_names() -> None:
    """A name changes about as often as the two tails differ, in total variation (at most twice)."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 500, generator=generator) * 2
    changed = logits + 0.02 * torch.randn(1, 500, generator=generator)
    old, new = torch.log_softmax(logits, -1), torch.log_softmax(changed, -1)
    n = 20_000
    ids = top_k(old, 16).ids.numpy().repeat(n, 0)
    zero, keys = np.zeros(n, np.int64), np.arange(n, dtype=np.uint64)
    before, after = (identify(one, zero, ids, zero, keys) for one in (old, new))
    tails = [one[0].double().exp().numpy() for one in (old, new)]
    for tail in tails:
        tail[ids[0]] = 0
        tail /= tail.sum()
    apart = 0.5 * np.abs(tails[0] - tails[1]).sum()
    share = (before != after).mean()
    deviation = CLAIMS.sigmas() * np.sqrt(2 * apart / n)
    assert apart - deviation < share < 2 * apart / (1 + apart) + deviation


def test_the_noise_is_uniform_and_independent() -> None:
    """Over keys, over tokens, and in pairs of neighbours of either."""
    keys = stream_bits(np.zeros(3000, np.uint64), np.arange(3000))
    noise = drawing._exponentials(keys, 400, torch.device("cpu"))
    numbers = (1 - torch.exp(-noise)).numpy()
    assert CLAIMS.fit(stats.chisquare(np.histogram(numbers, 1000, (0, 1))[0]).pvalue)
    for one, other in (
        (numbers[:, :-1], numbers[:, 1:]),
        (numbers[:-1], numbers[1:]),
        (numbers[:, :-64], numbers[:, 64:]),
        (numbers[:-1, :-1], numbers[1:, 1:]),
    ):
        pairs = np.histogram2d(one[::2].ravel(), other[::2].ravel(), 32, [(0, 1), (0, 1)])[0]
        assert CLAIMS.fit(stats.chisquare(pairs.ravel()).pvalue)


def test_the_noise_depends_on_seed_version_and_position() -> None:
    logprobs = rows_of(torch.zeros(1000), 4)
    seeds = np.arange(4, dtype=np.uint64)

    def tails(position: int, version: int, shift: int = 0) -> list[int]:
        streams = streams_of(seeds + np.uint64(shift), position, version)
        ids = np.full((4, 1), -1, np.int32)
        at = np.arange(4)
        return identify(logprobs, at, ids, streams.positions, streams.noise_seeds).tolist()

    assert tails(0, 0) == tails(0, 0)
    assert len({tuple(tails(*how)) for how in ((0, 0), (1, 0), (0, 1), (0, 0, 4))}) == 4
