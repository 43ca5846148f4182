"""Token trees in the torch engine: their layout, and tokens and KV as if every row ran alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch_cores
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import STOP, VOCAB
from torch_cores import check_against_hf, joined, run, texts_of
from tree_sources import CorruptTrees, OracleTrees, RandomTrees

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import Drafts, RolloutCache
from asyncrl.engine.drafting.trees import TokenTrees, no_trees, plant
from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.torch.core import DecodeCore
from asyncrl.engine.torch.model import SlotModel
from asyncrl.rollout.trajectory import IntArray, Provenance

LONG = 90
"""Tokens of a response in these tests."""


def load(path: str, slots: int = 4) -> SlotModel:
    return torch_cores.load(path, slots=slots, max_len=128)


def core_of(
    model: SlotModel, source: RolloutCache | None = None, *, draft: int = 12, **changes: Any
) -> DecodeCore:
    return torch_cores.core_of(
        model, source, max_step_tokens=200, max_draft_tokens=draft, **changes
    )


def requests(count: int, *, own_keys: bool = False) -> list[GenerateRequest]:
    """Long responses, of several temperatures; some may stop early."""
    rng = np.random.default_rng(3)
    out = []
    for i in range(count):
        prompt = rng.integers(0, STOP, rng.integers(1, 9)).astype(np.int32)
        sampling = SamplingParams(
            max_tokens=LONG,
            temperature=(1.0, 0.7, 1.4)[i % 3],
            stop_tokens=(STOP,) if i % 4 == 0 else (),
            top_k_logprobs=4,
            seed=i,
        )
        key = f"r{i}" if own_keys else f"k{i % 2}"
        out.append(GenerateRequest(f"r{i}", key, prompt, sampling))
    return out


SOURCES: dict[str, Any] = {
    "oracle": lambda texts: OracleTrees(texts, VOCAB),
    "random": lambda texts: RandomTrees(VOCAB),
    "corrupt": lambda texts: CorruptTrees(VOCAB),
    "cache": lambda texts: RolloutCache(
        CacheConfig(max_bytes=1 << 20, min_match=1, min_probability=0.0)
    ),
}


@pytest.mark.parametrize("source", list(SOURCES))
def test_trees_cannot_change_what_a_seed_generates(tiny_qwen3: str, source: str) -> None:
    """A draw depends on (seed, position) only: token by token the same, whatever was drafted."""
    model = load(tiny_qwen3)
    asked = requests(12, own_keys=source == "oracle")
    expected = texts_of(run(core_of(model, draft=0), asked))
    core = core_of(model, SOURCES[source](expected))
    assert texts_of(run(core, asked)) == expected
    stats = core.stats()
    assert stats.tokens.generated == sum(map(len, expected.values()))
    assert 0 < stats.tokens.accepted < stats.tokens.drafted


@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_llama"])
def test_kv_is_right_after_many_moved_paths(family: str, request: pytest.FixtureRequest) -> None:
    """Every accepted path is moved: a misplaced key would change later log-probabilities."""
    from transformers import AutoModelForCausalLM

    path = request.getfixturevalue(family)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model = load(path)
    asked = requests(6, own_keys=True)
    texts = texts_of(run(core_of(model, draft=0), asked))
    core = core_of(model, OracleTrees(texts, VOCAB))
    chunks = run(core, asked)
    assert core.stats().tokens.accepted > sum(map(len, texts.values())) / 2
    for one in asked:
        check_against_hf(plain, one, chunks[one.request_id])
        drafted = joined(chunks[one.request_id], "provenance") == Provenance.DRAFTED
        assert drafted.sum() >= len(texts[one.request_id]) // 3


def test_a_right_tree_saves_steps(tiny_qwen3: str) -> None:
    model = load(tiny_qwen3)
    asked = requests(1, own_keys=True)
    texts = texts_of(run(core_of(model, draft=0), asked))
    core = core_of(model, OracleTrees(texts, VOCAB))
    run(core, asked)
    # Six of twelve nodes are right: seven tokens a step.
    assert core.stats().steps <= 2 + -(-len(texts["r0"]) // 7) + 6


def test_chains_only_when_trees_are_turned_off(tiny_qwen3: str) -> None:
    asked_for = []

    class Watched(RandomTrees):
        def draft(self, *args: Any, **options: Any) -> Any:
            asked_for.append(options["branching"])
            return super().draft(*args, **options)

    for trees in (True, False):
        core = core_of(load(tiny_qwen3), Watched(VOCAB), draft_trees=trees)
        run(core, requests(2))
        assert set(asked_for) == {trees}
        asked_for.clear()


def test_trees_fill_a_slot_up_to_its_end(tiny_qwen3: str) -> None:
    """A row that may fill its slot to the end, and trees larger than what it may still generate."""
    model = load(tiny_qwen3, slots=2)
    one = requests(2, own_keys=True)[1]
    whole = replace(one.sampling, max_tokens=128 - len(one.prompt_tokens))
    asked = [replace(one, sampling=whole)]
    texts = texts_of(run(core_of(model, draft=0), asked))
    assert len(texts["r1"]) == whole.max_tokens
    for source in (OracleTrees(texts, VOCAB), RandomTrees(VOCAB)):
        assert texts_of(run(core_of(model, source, draft=60), asked)) == texts


def drafts_of(rows: list[list[tuple[int, int]]]) -> Drafts:
    nodes = [node for row in rows for node in row]
    offsets = np.cumsum([0, *map(len, rows)])
    return Drafts(
        np.array([t for t, _ in nodes], np.int32),
        np.array([p for _, p in nodes], np.int32),
        offsets.astype(np.int32),
        np.linspace(1, 0.1, len(nodes), dtype=np.float32),
    )


def plant_all(rows: list[list[tuple[int, int]]], keep: int = 99, vocab: int = 10) -> TokenTrees:
    many: IntArray = np.full(len(rows), keep, np.int32)
    return plant(drafts_of(rows), many, np.full(len(rows), 99, np.int32), vocab)


def paths_of(trees: TokenTrees) -> list[set[tuple[int, ...]]]:
    """Each row's set of paths from its root, one for each node."""
    out = []
    for start, end in zip(trees.offsets[:-1], trees.offsets[1:], strict=True):
        paths: list[tuple[int, ...]] = []
        for token, parent, depth in zip(
            trees.tokens[start:end], trees.parents[start:end], trees.depths[start:end], strict=True
        ):
            assert -1 <= parent < len(paths)
            paths.append((*(paths[parent] if parent >= 0 else ()), int(token)))
            assert len(paths[-1]) == depth
        assert len(set(paths)) == len(paths)
        out.append(set(paths))
    return out


def test_the_most_probable_path_comes_first() -> None:
    trees = plant_all([[(5, -1), (6, -1), (7, 0), (8, 1), (9, 2)], [(1, -1)]])
    assert trees.tokens.tolist() == [5, 7, 9, 6, 8, 1]
    assert trees.parents.tolist() == [-1, 0, 1, -1, 3, -1]
    assert trees.depths.tolist() == [1, 2, 3, 1, 2, 1]
    assert trees.forked
    assert sorted(zip(*trees.hidden(), strict=True)) == [
        (0, 4, 1), (0, 4, 2), (0, 4, 3), (0, 5, 1), (0, 5, 2), (0, 5, 3),
    ]  # fmt: skip
    fed = trees.fed(np.array([40, 41], np.int32), trees.tokens)
    assert fed.tolist() == [40, 5, 7, 9, 6, 8, 41, 1]


def test_invalid_nodes_are_left_out_with_their_descendants() -> None:
    twins = [(5, -1), (5, -1), (6, 1), (7, 0)]
    outside = [(10, -1), (3, 0), (-1, -1), (4, -1)]
    late = [(1, 1), (2, -1), (3, 2), (4, -2), (5, 1)]
    trees = plant_all([twins, outside, late])
    assert paths_of(trees) == [{(5,), (5, 7)}, {(4,)}, {(2,), (2, 5)}]
    assert not trees.forked


def test_trees_are_cut_to_the_chosen_nodes_and_the_depth_limit() -> None:
    rows = [[(i, i - 1) for i in range(6)]] * 2
    trees = plant(drafts_of(rows), np.array([3, 6], np.int32), np.array([6, 2], np.int32), 10)
    assert np.diff(trees.offsets).tolist() == [3, 2]
    wide = [[(5, -1), (6, -1), (7, 0), (8, 2), (9, 1)]]
    trees = plant(drafts_of(wide), np.array([9], np.int32), np.array([2], np.int32), 10)
    assert paths_of(trees) == [{(5,), (6,), (5, 7), (6, 9)}]
    assert no_trees(3).counts.tolist() == [1, 1, 1]


NODES = st.lists(st.tuples(st.integers(-1, 4), st.integers(-2, 9)), max_size=9)


@settings(max_examples=150)
@given(rows=st.lists(NODES, min_size=1, max_size=4), keep=st.integers(0, 9))
def test_plant_keeps_exactly_the_valid_nodes(rows: list[list[tuple[int, int]]], keep: int) -> None:
    trees = plant_all(rows, keep, vocab=4)
    expected: list[set[tuple[int, ...]]] = []
    for row in rows:
        named: dict[int, tuple[int, ...]] = {-1: ()}
        for node, (token, parent) in enumerate(row[:keep]):
            path = (*named.get(parent, (99,)), token)
            if 0 <= token < 4 and parent in named and path not in named.values():
                named[node] = path
        expected.append(set(named.values()) - {()})
    assert paths_of(trees) == expected
    hidden = set(zip(*(part.tolist() for part in trees.hidden()), strict=True))
    for i in range(trees.rows):
        parents = trees.parents[trees.offsets[i] : trees.offsets[i + 1]]
        for node in range(len(parents)):
            seen, at = {-1, node}, node
            while at >= 0:
                at = int(parents[at])
                seen.add(at)
            blind = {k for r, q, k in hidden if (r, q) == (i, node + 1)}
            assert blind == {k + 1 for k in range(node)} - {s + 1 for s in seen}
    assert trees.forked == any(len(p) != len(max(p, key=len, default=())) for p in expected)
