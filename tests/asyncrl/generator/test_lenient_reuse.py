"""Lenient reuse: what is remembered, and how an engine verifies it."""

import tracemalloc
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from new_weights import swap_weights
from tiny_models import STOP, make_qwen3

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.torch.core import CoreSettings, DecodeCore
from asyncrl.engine.torch.model import load_model
from asyncrl.generator.lenient_reuse import (
    ENTRY_BYTES,
    TOKEN_BYTES,
    LenientReuse,
    lenient_warning,
)
from asyncrl.rollout.trajectory import Provenance, SampleId, TrajectoryBuilder


def trajectory(prompt="p", sample=0, *, length=10, group=0, first=1, reason="stop"):
    builder = TrajectoryBuilder(SampleId(group, sample), prompt, np.array([1], np.int32))
    builder.append(
        tokens=np.arange(first, first + length, dtype=np.int32),
        logprobs=np.linspace(-1, -0.1, length).astype(np.float32),
        topk_ids=np.zeros((length, 8), np.int32),
        topk_logprobs=np.zeros((length, 8), np.float32),
        noise_seeds=np.full(length, 17, np.uint64),
        provenance=np.zeros(length, np.uint8),
        policy_version=group,
    )
    return builder.finish(reason)


def store(max_bytes=1 << 20, lenience=1.5):
    return LenientReuse(lenience=lenience, max_bytes=max_bytes)


def test_a_sample_begins_with_its_last_trajectory():
    reuse = store()
    reuse.remember(trajectory(group=0, first=1))
    reuse.remember(trajectory(group=5, first=7))
    reuse.remember(trajectory(sample=1, first=30))
    kept = reuse.tokens_to_verify("p", 0)
    assert kept is not None
    assert kept.tokens.tolist() == list(range(7, 17))
    assert kept.logprobs == pytest.approx(np.linspace(-1, -0.1, 10))
    assert (kept.topk_ids.shape, kept.topk_logprobs.shape) == ((10, 0), (10, 0))
    assert kept.lenience == 1.5
    assert reuse.tokens_to_verify("p", 2) is None
    assert reuse.tokens_to_verify("q", 0) is None
    assert len(reuse) == 2
    turns = trajectory(group=6, first=7)
    observed = replace(turns, provenance=np.full(10, Provenance.OBSERVED, np.uint8))
    reuse.remember(observed)
    assert reuse.tokens_to_verify("p", 0) is None, "the rule is not defined for observed tokens"


def test_an_aborted_trajectory_is_not_remembered():
    reuse = store()
    reuse.remember(trajectory(reason="abort"))
    assert reuse.tokens_to_verify("p", 0) is None


def test_the_least_recently_used_trajectory_is_dropped_first():
    room = 3 * (ENTRY_BYTES + 10 * TOKEN_BYTES)
    reuse = store(room)
    for sample in range(3):
        reuse.remember(trajectory(sample=sample))
    reuse.tokens_to_verify("p", 0)
    reuse.remember(trajectory(sample=3))
    assert [reuse.tokens_to_verify("p", sample) is not None for sample in range(4)] == [
        True, False, True, True,
    ]  # fmt: skip
    assert (reuse.dropped, reuse.nbytes) == (1, room)


def test_a_trajectory_larger_than_the_budget_is_dropped_and_so_is_its_predecessor():
    reuse = store(2000)
    reuse.remember(trajectory(length=10))
    reuse.remember(trajectory(length=1000))
    assert reuse.tokens_to_verify("p", 0) is None
    assert (len(reuse), reuse.nbytes, reuse.dropped) == (0, 0, 1)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("remember"), st.integers(0, 4), st.integers(1, 60)),
            st.tuples(st.just("ask"), st.integers(0, 4), st.just(0)),
        ),
        max_size=60,
    )
)
def test_it_behaves_as_a_bounded_lru_cache(operations):
    """Compared with the simplest model of one."""
    room = 1500
    reuse, model = store(room), OrderedDict()
    for what, sample, length in operations:
        if what == "ask":
            kept = reuse.tokens_to_verify("p", sample)
            assert (None if kept is None else len(kept)) == model.get(sample)
            if sample in model:
                model.move_to_end(sample)
            continue
        reuse.remember(trajectory(sample=sample, length=length))
        model.pop(sample, None)
        model[sample] = length
        while sum(ENTRY_BYTES + TOKEN_BYTES * one for one in model.values()) > room:
            model.popitem(last=False)
        assert reuse.nbytes <= room
        assert len(reuse) == len(model)


def test_the_estimate_covers_the_memory_really_used():
    reuse = store(1 << 30)
    made = [trajectory(prompt=f"prompt-{i}", length=20) for i in range(2000)]
    tracemalloc.start()
    try:
        for one in made:
            reuse.remember(one)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 * reuse.nbytes < taken < reuse.nbytes


def test_lenient_reuse_is_off_by_default_and_comes_with_a_warning():
    assert LenientReuse.from_config(CacheConfig()) is None
    assert lenient_warning(CacheConfig()) is None
    config = CacheConfig(reuse="lenient", lenience=2.0)
    reuse = LenientReuse.from_config(config)
    assert reuse is not None
    reuse.remember(trajectory())
    kept = reuse.tokens_to_verify("p", 0)
    assert kept is not None
    assert kept.lenience == 2.0
    warning = lenient_warning(config)
    assert warning is not None
    assert "BIASED" in warning
    assert "0.137" in warning


def chunks_of(core, request):
    core.add(request)
    chunks = []
    while core.has_work:
        chunks += core.step()
    return chunks


def test_tokens_that_an_engine_keeps_carry_the_current_policys_log_probabilities(tiny_qwen3):
    """Two epochs under different policies, with a lenience at which every token is kept."""
    torch.set_num_threads(1)
    model = load_model(
        tiny_qwen3, slots=2, max_len=64, device=torch.device("cpu"), dtype=torch.float32
    )
    settings = CoreSettings(
        max_step_tokens=100, max_draft_tokens=0, max_prefill_tokens=500, chunk_tokens=4, top_k=4
    )
    core = DecodeCore(model, settings, None, seed=7, planner=None)
    prompt = np.array([1, 2, 3], np.int32)
    sampling = SamplingParams(max_tokens=20, stop_tokens=(STOP,), top_k_logprobs=4, seed=5)
    builder = TrajectoryBuilder(SampleId(0, 0), "p", prompt)
    for chunk in chunks_of(core, GenerateRequest("first", "p", prompt, sampling)):
        chunk.append_to(builder)
    first = builder.finish("length")
    reuse = store(lenience=1e6)
    reuse.remember(first)
    now = make_qwen3(seed=1)
    swap_weights(core, now.state_dict().items(), 3)
    kept = reuse.tokens_to_verify("p", 0)
    assert kept is not None
    again = chunks_of(
        core, GenerateRequest("second", "p", prompt, replace(sampling, seed=6), kept=kept)
    )
    tokens = np.concatenate([chunk.tokens for chunk in again])
    got = np.concatenate([chunk.logprobs for chunk in again])
    provenance = np.concatenate([chunk.provenance for chunk in again])
    assert tokens.tolist() == first.tokens.tolist()
    assert (provenance == Provenance.VERIFIED).all()
    assert {chunk.policy_version for chunk in again} == {3}
    whole = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
    with torch.no_grad():
        logprobs = now(whole[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    wanted = logprobs[torch.arange(len(tokens)), whole[len(prompt) :]].numpy()
    assert got == pytest.approx(wanted, abs=1e-4)
    assert np.abs(got - first.behaviour_logprobs).max() > 0.01
