"""A batch-invariant model: every reported number is the same bits whatever else is in the batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import VOCAB
from torch_cores import core_of, joined, kept_of, load, mixed_requests, run, tokens_of
from tree_sources import RandomTrees

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.errors import EngineStartError
from asyncrl.engine.protocol import GenerateRequest, ScoreRequest, TokenChunk
from asyncrl.engine.torch.core import DecodeCore
from asyncrl.engine.torch.model import SlotModel, load_model

FIELDS = ("tokens", "logprobs", "topk_ids", "topk_logprobs")
Numbers = dict[str, dict[str, bytes]]


def numbers_of(chunks: dict[str, list[TokenChunk]]) -> Numbers:
    """The bits of everything reported of each request, except how its tokens came about."""
    return {
        name: {what: joined(parts, what).tobytes() for what in FIELDS}
        for name, parts in chunks.items()
    }


TRUNCATIONS: list[dict[str, float]] = [{}, {"top_p": 0.9}, {}, {"top_k": 5, "min_p": 0.05}]


def requests() -> list[GenerateRequest]:
    """Requests of several lengths and temperatures; half of them truncate the distribution."""
    return [
        replace(r, sampling=replace(r.sampling, max_tokens=40, **TRUNCATIONS[i % 4]))
        for i, r in enumerate(mixed_requests(12))
    ]


def one_at_a_time(model: SlotModel) -> Numbers:
    out: Numbers = {}
    for one in requests():
        out |= numbers_of(run(core_of(model, max_draft_tokens=0), [one]))
    return out


@pytest.fixture(scope="module", params=[("tiny_qwen3", True), ("tiny_llama", False)])
def model(request: pytest.FixtureRequest) -> SlotModel:
    """Batch-invariant, by the fused forward pass and by transformers'."""
    path, fused = request.param
    out = load(request.getfixturevalue(path), slots=12, batch_invariant=True, fused=fused)
    assert (out._fused is not None) == fused
    return out


@pytest.fixture(scope="module")
def alone(model: SlotModel) -> Numbers:
    """What each request reports when it has the engine to itself, without drafts."""
    return one_at_a_time(model)


def in_another_order(chosen: Sequence[GenerateRequest], seed: int) -> list[GenerateRequest]:
    return [chosen[i] for i in np.random.default_rng(seed).permutation(len(chosen))]


def arriving_late(core: DecodeCore, chosen: Sequence[GenerateRequest]) -> Numbers:
    """Requests that arrive at different steps, so that some copy the prompt's KV of a sibling."""
    chunks: dict[str, list[TokenChunk]] = defaultdict(list)
    for one in chosen:
        core.add(one)
        for chunk in core.step():
            chunks[chunk.request_id].append(chunk)
    for name, more in run(core).items():
        chunks[name] += more
    return numbers_of(chunks)


def test_the_batch_changes_no_bit(model: SlotModel, alone: Numbers) -> None:
    core = core_of(model, max_draft_tokens=0)
    assert numbers_of(run(core, in_another_order(requests(), 1))) == alone
    assert arriving_late(core, in_another_order(requests(), 2)) == alone
    few = load(
        model.module.name_or_path,
        slots=3,
        max_len=80,
        batch_invariant=True,
        fused=model._fused is not None,
    )
    assert numbers_of(run(core_of(few, max_draft_tokens=0), requests())) == alone


def test_drafts_change_no_bit(model: SlotModel, alone: Numbers) -> None:
    cache = RolloutCache(CacheConfig(max_bytes=1 << 20, min_match=1, min_probability=0.0))
    chains = core_of(model, cache, max_step_tokens=200, draft_trees=False)
    assert numbers_of(run(chains, requests())) == alone
    assert chains.stats().tokens.drafted > 0
    trees = core_of(model, RandomTrees(VOCAB), max_step_tokens=200, max_draft_tokens=12)
    assert arriving_late(trees, requests()) == alone
    assert trees.stats().tokens.accepted > 0


def test_a_continued_response_has_the_same_bits(model: SlotModel, alone: Numbers) -> None:
    """A prefix that is fed as a context, and tokens that are verified under the same weights."""
    one = requests()[0]
    whole = run(core_of(model), [one])[one.request_id]
    tokens = np.array(tokens_of(whole), np.int32)
    cut = len(tokens) // 2
    rest = numbers_of(run(core_of(model), [replace(one, prefix_tokens=tokens[:cut])]))
    for what in FIELDS:
        assert joined(whole, what)[cut:].tobytes() == rest[one.request_id][what]
    verified = numbers_of(run(core_of(model), [replace(one, kept=kept_of(whole))]))
    assert verified == {one.request_id: alone[one.request_id]}


def test_scores_are_the_bits_of_sampling(model: SlotModel) -> None:
    core = core_of(model)
    chunks = run(core, requests())
    asked = [
        ScoreRequest(
            r.request_id, r.prompt_tokens, joined(chunks[r.request_id], "tokens"), r.sampling
        )
        for r in requests()
    ]
    for score in core.score(asked):
        drawn = chunks[score.request_id]
        assert score.logprobs.tobytes() == joined(drawn, "logprobs").tobytes()
        assert score.topk_logprobs.tobytes() == joined(drawn, "topk_logprobs").tobytes()


def test_without_it_the_batch_does_change_bits(tiny_qwen3: str) -> None:
    """Otherwise these tests show nothing."""
    plain = load(tiny_qwen3, slots=12)
    assert numbers_of(run(core_of(plain), requests())) != one_at_a_time(plain)


def test_only_a_cpu_in_float32_is_batch_invariant(tiny_qwen3: str) -> None:
    with pytest.raises(EngineStartError, match=r"engine\.dtype: float32"):
        load_model(
            tiny_qwen3,
            slots=1,
            max_len=16,
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
            batch_invariant=True,
        )


def test_a_machine_on_which_the_batch_matters_is_refused(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without padding, a single token goes through another kernel of the matrix library."""
    monkeypatch.setattr("asyncrl.engine.torch.cpu.invariant_attention.TOKENS", 1)
    with pytest.raises(EngineStartError, match=r"run\.repeatable: true does not work"):
        load(tiny_qwen3, batch_invariant=True)
