"""The compiled loops of a step against plain Python, on random steps."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.engine.torch.step_kernels import (
    GeneratedTokens,
    advance_rows,
    append_draws,
    choose_draws,
    pack,
    pick_tokens,
    place_draws,
)
from asyncrl.rollout.trajectory import Provenance

SEEDS = range(30)


@pytest.mark.parametrize("seed", SEEDS)
def test_draws_are_placed_row_by_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, forked = int(rng.integers(1, 9)), int(rng.integers(0, 4))
    sizes = rng.integers(1, 5, n).astype(np.int32)
    depths = rng.integers(0, 4, sizes[:forked].sum()).astype(np.int32)
    responses = rng.integers(0, 50, n).astype(np.int32)
    seeds, noise = rng.integers(0, 1 << 63, (2, n + 3)).astype(np.uint64)
    places = place_draws(sizes, depths, responses, seeds, noise)
    row = [r for r in range(n) for _ in range(sizes[r])]
    offsets = [i for r in range(n) for i in range(sizes[r])]
    offsets[: len(depths)] = depths.tolist()
    assert places.row.tolist() == row
    assert places.starts.tolist() == [0, *np.cumsum(sizes)[:-1].tolist()]
    assert places.positions.tolist() == (responses[row] + offsets).tolist()
    assert (places.seeds == seeds[row]).all()
    assert (places.noise_seeds == noise[row]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_paths_end_after_a_stop_token_and_at_the_limit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 9))
    walked = int(rng.integers(0, n + 1))
    accepted = rng.integers(0, 4, n).astype(np.int32)
    counts = accepted + 1
    starts = np.cumsum(counts) - counts
    tokens = rng.integers(0, 6, counts.sum())
    walk = rng.integers(0, len(tokens), counts[:walked].sum()).astype(np.int32)
    stops = np.where(rng.random((n + 2, 2)) < 0.5, rng.integers(0, 6, (n + 2, 2)), -1)
    begun = (rng.integers(0, 2, n) * rng.integers(0, accepted + 1)).astype(np.int32)
    left = rng.integers(1, 5, n).astype(np.int32)
    paths, ends = [], []
    for r in range(n):
        path = [int(starts[r]) + i for i in range(counts[r])]
        if r < walked:
            path = walk[int(starts[r]) :][: counts[r]].tolist()
        path = path[: left[r]]
        at = [i for i, draw in enumerate(path) if tokens[draw] in stops[r] and i >= begun[r]]
        paths.append(path[: at[0] + 1] if at else path)
        ends.append(bool(at))
    size = int(counts.sum())
    chosen, row, step = (np.full(size, -9, np.int64) for _ in range(3))
    kept, stopped = np.full(n, -9, np.int32), np.ones(n, np.bool_)
    found = choose_draws(
        accepted, starts, walked, walk, tokens, stops, begun, left, chosen, row, step, kept, stopped
    )
    assert chosen[:found].tolist() == [draw for path in paths for draw in path]
    assert row[:found].tolist() == [r for r, path in enumerate(paths) for _ in path]
    assert step[:found].tolist() == [i for path in paths for i in range(len(path))]
    assert kept.tolist() == list(map(len, paths))
    assert stopped.tolist() == ends


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_append_report_and_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, slots, k, chunk = int(rng.integers(1, 9)), 10, 3, 4
    kept = rng.integers(1, 4, n).astype(np.int32)
    row = np.repeat(np.arange(n), kept)
    step = np.concatenate([np.arange(size) for size in kept])
    drawn = len(row) + 4
    chosen = rng.permutation(drawn)[: len(row)]
    tokens, noise = rng.integers(0, 99, drawn), rng.integers(0, 99, drawn).astype(np.uint64)
    logprobs = rng.random(drawn).astype(np.float32)
    ids = rng.integers(0, 99, (drawn, k)).astype(np.int32)
    values = rng.random((drawn, k)).astype(np.float32)
    accepted = rng.integers(0, 3, n).astype(np.int32)
    judged, stopped = rng.random(n) < 0.3, rng.random(n) < 0.3
    contexts = np.full((slots, 40), -1, np.int32)
    total = rng.integers(1, 20, slots).astype(np.int32)
    limit = total + rng.integers(3, 9, slots).astype(np.int32)
    count = rng.integers(0, 4, slots).astype(np.int32)
    begun = rng.random(slots) < 0.5
    before, had, kv_length = total.copy(), count.copy(), np.zeros(slots, np.int32)
    buffers = GeneratedTokens.empty(slots, 9, top_k=k)
    for buffer in buffers:
        buffer[:] = 0
    append_draws(
        chosen, row, step, accepted, judged, tokens, logprobs, ids, values, noise,
        contexts, total, count, buffers,
    )  # fmt: skip
    due, ended = np.empty(n, np.int64), np.empty(n, np.int64)
    dues, ends = advance_rows(
        kept, stopped, judged, total, limit, kv_length, count, begun, chunk, due, ended
    )
    for r in range(n):
        mine = chosen[row == r]
        assert contexts[r, before[r] : before[r] + kept[r]].tolist() == tokens[mine].tolist()
        assert (contexts[r, before[r] + kept[r] :] == -1).all()
        new = slice(had[r], had[r] + kept[r])
        if judged[r]:
            assert not buffers.tokens[r].any(), "reported in another way"
            continue
        assert buffers.tokens[r, new].tolist() == tokens[mine].tolist()
        assert (buffers.logprobs[r, new] == logprobs[mine]).all()
        assert (buffers.topk_ids[r, new] == ids[mine]).all()
        assert (buffers.topk_logprobs[r, new] == values[mine]).all()
        assert (buffers.noise_seeds[r, new] == noise[mine]).all()
        drafted = np.arange(kept[r]) < accepted[r]
        assert ((buffers.provenance[r, new] == Provenance.DRAFTED) == drafted).all()
        assert ((buffers.provenance[r, new] == Provenance.SAMPLED) == ~drafted).all()
    assert (total[:n] == before[:n] + kept).all()
    assert (total[n:] == before[n:]).all()
    assert (kv_length[:n] == total[:n] - 1).all()
    assert (count[:n] == had[:n] + kept).all()
    over = stopped | (total[:n] >= limit[:n])
    assert ended[:ends].tolist() == np.flatnonzero(over)[::-1].tolist()
    wanted = ~over & (judged | (count[:n] >= chunk) | ~begun[:n])
    assert sorted(due[:dues].tolist()) == np.flatnonzero(wanted).tolist()
    rows, sizes = np.arange(n - 1, -1, -1), count[:n][::-1].copy()
    packed = pack(buffers, rows, sizes)
    for whole, buffer in zip(packed, buffers, strict=True):
        parts = [buffer[r, :size] for r, size in zip(rows, sizes, strict=True)]
        assert (whole == np.concatenate(parts)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_of_some_rows_are_picked(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 9))
    kept = rng.integers(0, 4, n).astype(np.int32)
    chosen = rng.permutation(40)[: kept.sum()]
    tokens, wanted = rng.integers(0, 99, 40), rng.random(n) < 0.6
    picked, offsets = np.empty(len(chosen), np.int32), np.empty(n + 1, np.int32)
    count = pick_tokens(chosen, tokens, kept, wanted, picked, offsets)
    assert count == wanted.sum()
    of_rows = np.split(chosen, np.cumsum(kept)[:-1])
    parts = [part for part, yes in zip(of_rows, wanted, strict=True) if yes]
    expected = [int(tokens[draw]) for part in parts for draw in part]
    assert picked[: offsets[count]].tolist() == expected
    assert offsets[: count + 1].tolist() == [0, *np.cumsum([len(part) for part in parts]).tolist()]
