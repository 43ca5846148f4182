"""How trees are fed to SGLang, what is accepted, and what KV is moved: against plain loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.cache.tree.rollout_tree import Drafts
from asyncrl.engine.drafting.trees import TokenTrees, no_trees, plant
from asyncrl.engine.sglang.worker.drafts.verify_step import (
    Feed,
    accepted_nodes,
    full_mask,
    hidden_places,
    lay_out,
    moves,
    paths_of,
    walk_on_device,
)
from asyncrl.engine.sglang.worker.segments import segments_of, visible
from asyncrl.rollout.acceptance import accept_tree
from asyncrl.rollout.trajectory import IntArray

VOCAB = 5


@dataclass(frozen=True)
class Scene:
    """A step: trees of its rows, their texts' lengths, and a draw after each fed token."""

    trees: TokenTrees
    contexts: NDArray[np.int64]
    draws: NDArray[np.int64]
    """`[n + N]` in the order of last tokens and nodes."""

    @property
    def last(self) -> IntArray:
        return np.arange(self.trees.rows, dtype=np.int32) % VOCAB

    def ancestors(self, row: int, node: int) -> list[int]:
        """Fed places on a node's path, itself included; node -1 is the last token."""
        begin = int(self.trees.offsets[row])
        places = []
        while node >= 0:
            places.append(node + 1)
            node = int(self.trees.parents[begin + node])
        return [0, *reversed(places)]


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    rows = draw(st.integers(1, 5))
    sizes = rng.integers(0, 7, rows)
    nodes = int(sizes.sum())
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    place = np.concatenate([np.arange(size) for size in sizes]) if nodes else np.empty(0)
    parents = np.array([rng.integers(-1, max(i, 1)) if i else -1 for i in place], np.int32)
    drafts = Drafts(
        rng.integers(0, VOCAB, nodes).astype(np.int32),
        parents,
        offsets,
        np.linspace(1, 0.1, nodes, dtype=np.float32),
    )
    plenty = np.full(rows, 99, np.int32)
    trees = plant(drafts, plenty, plenty, VOCAB)
    count = rows + len(trees.tokens)
    return Scene(trees, rng.integers(0, 6, rows), rng.integers(0, VOCAB, count))


def starts_of(feed: Feed) -> list[int]:
    return (np.cumsum(feed.counts) - feed.counts).tolist()


@given(scenes(), st.booleans())
def test_each_row_feeds_its_last_token_and_its_nodes_where_their_paths_lead(
    scene: Scene, ragged: bool
) -> None:
    trees = scene.trees
    feed = lay_out(trees, scene.last, scene.contexts, ragged=ragged)
    starts = starts_of(feed)
    expected = []
    for row in range(trees.rows):
        begin, end = int(trees.offsets[row]), int(trees.offsets[row + 1])
        context = int(scene.contexts[row])
        expected.append((starts[row], row, 0, int(scene.last[row]), context))
        for node in range(end - begin):
            depth = len(scene.ancestors(row, node)) - 1
            token = int(trees.tokens[begin + node])
            expected.append((starts[row] + node + 1, row, node + 1, token, context + depth))
    real = np.arange(len(feed.tokens)) if feed.real is None else feed.real
    got = zip(
        real.tolist(),
        feed.row[real].tolist(),
        feed.place[real].tolist(),
        feed.tokens[real].tolist(),
        feed.positions[real].tolist(),
        strict=True,
    )
    assert list(got) == expected
    assert len(feed.tokens) == feed.counts.sum()
    if ragged:
        assert (feed.counts == trees.counts).all()
        assert feed.real is None
    else:
        assert set(feed.counts.tolist()) == {int(trees.counts.max())}


@given(scenes(), st.booleans())
def test_kv_of_an_accepted_path_ends_up_where_a_text_without_drafts_would_have_it(
    scene: Scene, ragged: bool
) -> None:
    trees = scene.trees
    walks = accept_tree(scene.draws, trees.tokens, trees.parents, trees.offsets)
    path, counts = paths_of(walks, trees)
    feed = lay_out(trees, scene.last, scene.contexts, ragged=ragged)
    kv = [(int(row), int(place)) for row, place in zip(feed.row, feed.place, strict=True)]
    sources, targets = (places.tolist() for places in moves(feed, path, counts))
    assert len(set(targets)) == len(targets)
    read = [kv[source] for source in sources]
    for target, entry in zip(targets, read, strict=True):
        kv[target] = entry
    flags = accepted_nodes(trees, path, counts)
    emitted = iter(walks.emitted.tolist())
    for row, start in enumerate(starts_of(feed)):
        begin = int(trees.offsets[row])
        # Follow the draws by hand.
        at, places = -1, [0]
        children = range(int(trees.offsets[row + 1]) - begin)
        while True:
            drawn = int(scene.draws[begin + row + at + 1])
            assert next(emitted) == drawn
            below = [
                node
                for node in children
                if trees.parents[begin + node] == at and trees.tokens[begin + node] == drawn
            ]
            if not below:
                break
            (at,) = below
            places.append(at + 1)
        assert path[row, : counts[row]].tolist() == places
        assert kv[start : start + len(places)] == [(row, place) for place in places]
        mine = flags[begin : int(trees.offsets[row + 1])]
        assert (np.flatnonzero(mine) + 1).tolist() == places[1:]


@given(scenes())
def test_walks_on_a_device_are_those_on_the_host(scene: Scene) -> None:
    trees = scene.trees
    walks = accept_tree(scene.draws, trees.tokens, trees.parents, trees.offsets)
    path, counts = paths_of(walks, trees)
    width = int(trees.counts.max())
    draws, nodes = (np.zeros((trees.rows, width), np.int64) for _ in range(2))
    parents = np.full((trees.rows, width), -1, np.int64)
    for row in range(trees.rows):
        begin, size = int(trees.offsets[row]), int(trees.counts[row])
        draws[row, :size] = scene.draws[begin + row : begin + row + size]
        nodes[row, 1:size] = trees.tokens[begin : begin + size - 1]
        parents[row, 1:size] = trees.parents[begin : begin + size - 1] + 1
    depth = path.shape[1] - 1
    there, number = walk_on_device(*(map(torch.from_numpy, (draws, nodes, parents))), depth)
    assert number.tolist() == counts.tolist()
    assert there.tolist() == path.tolist()


def by_hand(scene: Scene, feed: Feed) -> list[NDArray[np.bool_]]:
    """What each row's places may attend to: the context, then their ancestors and themselves."""
    masks = []
    for row, count in enumerate(feed.counts.tolist()):
        context = int(scene.contexts[row])
        mask = np.zeros((count, context + count), np.bool_)
        mask[:, :context] = True
        for node in range(-1, int(scene.trees.counts[row]) - 1):
            mask[node + 1, [context + place for place in scene.ancestors(row, node)]] = True
        masks.append(mask)
    return masks


@given(scenes())
def test_a_node_attends_to_the_context_and_its_own_path(scene: Scene) -> None:
    feed = lay_out(scene.trees, scene.last, scene.contexts, ragged=False)
    flat = full_mask(scene.trees, feed, scene.contexts, torch.device("cpu")).numpy()
    at = 0
    for row, mask in enumerate(by_hand(scene, feed)):
        got = flat[at : at + mask.size].reshape(mask.shape)
        at += mask.size
        fed = int(scene.trees.counts[row])
        assert (got[:fed] == mask[:fed]).all()
        assert got[fed:].any(axis=1).all()  # padding attends to something: no softmax of nothing
        assert not got[:fed, int(scene.contexts[row]) + fed :].any()
    assert at == len(flat)


class Operations(TorchDispatchMode):
    """Counts what is done with tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 500])
def test_a_plain_step_has_a_mask_of_ones_made_in_one_operation(rows: int) -> None:
    """However many rows there are, and whatever their contexts: on a GPU every step needs one."""
    contexts = np.arange(rows) * 7 % 90
    feed = lay_out(no_trees(rows), np.zeros(rows, np.int32), contexts, ragged=False)
    with Operations() as operations:
        mask = full_mask(no_trees(rows), feed, contexts, torch.device("cpu"))
    assert mask.all()
    assert len(mask) == (contexts + 1).sum()
    assert operations.count == 1


@given(scenes(), st.sampled_from([1, 2]))
def test_attention_over_segments_is_attention_with_the_whole_mask(
    scene: Scene, kv_heads: int
) -> None:
    heads, size, slots = 4, 8, 200
    feed = lay_out(scene.trees, scene.last, scene.contexts, ragged=True)
    torch.manual_seed(0)
    q = torch.randn(len(feed.tokens), heads, size)
    k, v = torch.randn(2, slots, kv_heads, size)
    table = torch.stack([torch.randperm(slots)[:40] for _ in range(scene.trees.rows)])
    masks = visible(feed.counts, *hidden_places(scene.trees, feed))
    segments = segments_of(table.int(), scene.contexts, feed.counts, masks)
    out = torch.full_like(q, torch.nan)
    segments.attend(q, k, v, 0.3, out)
    for row, (start, mask) in enumerate(zip(starts_of(feed), by_hand(scene, feed), strict=True)):
        count, length = mask.shape
        keys = k[table[row, :length]].repeat_interleave(heads // kv_heads, 1)
        values = v[table[row, :length]].repeat_interleave(heads // kv_heads, 1)
        weights = torch.einsum("qhd,khd->hqk", q[start : start + count], keys) * 0.3
        weights = weights.masked_fill(~torch.from_numpy(mask), -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, values)
        torch.testing.assert_close(out[start : start + count], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[1] * 130, [3, 90, 4, 5, 91, 400]])
def test_rows_of_one_token_are_taken_together_only_if_they_are_alike(lengths: list[int]) -> None:
    contexts = np.array(lengths, np.int64) - 1
    table = torch.arange(500).repeat(len(lengths), 1)
    found = segments_of(table, contexts, np.ones_like(contexts)).singles
    assert sorted(row for one in found for row in one.tokens.tolist()) == list(range(len(lengths)))
    for one in found:
        mine = [lengths[row] for row in one.tokens.tolist()]
        assert len(mine) <= 64
        assert max(mine) <= 1.25 * min(mine) + 32
        assert one.slots.shape == (len(mine), max(mine))
