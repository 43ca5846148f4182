"""DecodeCore: log-probabilities, batching, drafting, order, ends."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import STOP, VOCAB
from torch_cores import (
    PROMPT,
    check_against_hf,
    core_of,
    joined,
    kept_of,
    load,
    mixed_requests,
    request,
    run,
    texts_of,
    tokens_of,
)

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.protocol import SamplingParams
from asyncrl.rollout.trajectory import Provenance
from asyncrl.tasks.evaluation_config import EvaluationConfig

NONE = np.empty(0, np.int32)


@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_llama"])
def test_logprobs_equal_a_plain_forward_pass(family: str, request: pytest.FixtureRequest) -> None:
    from transformers import AutoModelForCausalLM

    path = request.getfixturevalue(family)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    core = core_of(load(path), RolloutCache(CacheConfig(max_bytes=1 << 20)))
    requests = mixed_requests()
    chunks = run(core, requests)
    drafted = 0
    for one in requests:
        check_against_hf(plain, one, chunks[one.request_id])
        provenance = joined(chunks[one.request_id], "provenance")
        drafted += int((provenance == Provenance.DRAFTED).sum())
    assert drafted == core.stats().tokens.accepted > 0


@pytest.mark.parametrize("source", ["none", "cache", "old", "wrong"])
def test_drafting_cannot_change_what_a_seed_generates(tiny_qwen3: str, source: str) -> None:
    """The draw at a position depends on (seed, position) only, so every token must be the same."""
    model = load(tiny_qwen3)
    plain = core_of(model, max_draft_tokens=0)
    requests = mixed_requests(16)
    expected = texts_of(run(plain, requests))
    rng = np.random.default_rng(0)
    cache = RolloutCache(CacheConfig(max_bytes=1 << 20, min_match=1, min_probability=0.0))
    core = core_of(model, cache if source == "cache" else None)
    for r in requests:
        old = NONE
        if source == "old":
            old = np.array(expected[r.request_id], np.int32)
            old[len(old) // 2 :][:1] = 0  # diverges once; then the text must be found again
        elif source == "wrong":
            old = rng.integers(0, VOCAB, 12).astype(np.int32)
        core.add(replace(r, draft_tokens=old))
    assert texts_of(run(core)) == expected
    stats = core.stats()
    assert stats.tokens.generated == sum(map(len, expected.values()))
    assert (stats.tokens.drafted > 0) == (source != "none")
    if source == "old":
        assert stats.steps < plain.stats().steps


def test_a_right_earlier_continuation_is_generated_in_few_steps(tiny_qwen3: str) -> None:
    model = load(tiny_qwen3)
    first = core_of(model)
    first.add(request("a", seed=5, max_tokens=30, stop_tokens=()))
    old = np.array(tokens_of(run(first)["a"]), np.int32)
    again = core_of(model)
    again.add(request("a", seed=5, max_tokens=30, stop_tokens=(), draft_tokens=old))
    chunks = run(again)["a"]
    assert tokens_of(chunks) == old.tolist()
    assert again.stats().steps <= 1 + -(-29 // 7)
    broken = np.delete(old, 10)  # from here on it is off by one
    third = core_of(model)
    third.add(request("a", seed=5, max_tokens=30, stop_tokens=(), draft_tokens=broken))
    assert tokens_of(run(third)["a"]) == old.tolist()
    assert third.stats().steps <= 16


def test_siblings_share_a_prompt_and_differ_by_seed(tiny_qwen3: str) -> None:
    """Followers of a leader, a copy from a running row, and a lone request agree token by token."""
    model = load(tiny_qwen3, slots=6)
    together = core_of(model)
    for i in range(4):
        together.add(request(f"s{i}", seed=i))
    chunks = together.step()
    together.add(request("s4", seed=4))  # arrives while its siblings run
    out = defaultdict(list)
    for chunk in chunks:
        out[chunk.request_id].append(chunk)
    for name, more in run(together).items():
        out[name] += more
    for i in range(5):
        alone = core_of(model)
        alone.add(request("x", seed=i))
        assert tokens_of(out[f"s{i}"]) == tokens_of(run(alone)["x"])


def test_a_resumed_prefix_continues_as_the_whole_response_would(tiny_qwen3: str) -> None:
    model = load(tiny_qwen3)
    whole = core_of(model)
    whole.add(request("a", seed=11, stop_tokens=()))
    generated = tokens_of(run(whole)["a"])
    rest = core_of(model)
    prefix = np.array(generated[:5], np.int32)
    rest.add(request("a", seed=11, stop_tokens=(), prefix_tokens=prefix))
    assert tokens_of(run(rest)["a"]) == generated[5:]


def test_ends_are_reported_once_with_their_reason(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3), RolloutCache(CacheConfig(max_bytes=1 << 20)))
    for i in range(40):
        core.add(request(f"r{i}", seed=i, max_tokens=9))
    reasons = set()
    for chunks in run(core).values():
        assert all(c.finish_reason is None for c in chunks[:-1])
        generated = tokens_of(chunks)
        stopped = chunks[-1].finish_reason == "stop"
        assert stopped == (generated[-1] == STOP)
        assert STOP not in generated[:-1]
        assert len(generated) == 9 or stopped
        reasons.add(chunks[-1].finish_reason)
    assert reasons == {"stop", "length"}


def test_top_k_beyond_the_nucleus_is_padded(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3))
    core.add(request("a", top_p=0.3, seed=1))
    chunks = run(core)["a"]
    ids = np.concatenate([c.topk_ids for c in chunks])
    top = np.concatenate([c.topk_logprobs for c in chunks])
    assert (ids[:, -1] == -1).any()
    assert ((ids == -1) == np.isneginf(top)).all()
    np.testing.assert_allclose(np.exp(top).sum(1), 1, atol=1e-5)


def test_greedy_tokens_are_the_most_probable_and_verified_as_such(tiny_qwen3: str) -> None:
    """As held-out samples with `evaluation.temperature: 0`, whatever the seed; beside others."""
    model = load(tiny_qwen3)
    core = core_of(model)
    core.add(request("drawn", seed=3, stop_tokens=()))
    greedy = EvaluationConfig(temperature=0).sampling_of(SamplingParams(9, top_p=0.9, top_k=5))
    assert (greedy.top_k, EvaluationConfig().sampling_of(greedy)) == (1, greedy)
    for seed in range(3):
        core.add(request(f"{seed}", seed=seed, stop_tokens=(), top_k=greedy.top_k))
    found = run(core)
    assert len({tuple(tokens_of(found[f"{seed}"])) for seed in range(3)}) == 1
    assert tokens_of(found["drawn"]) != tokens_of(found["0"])
    for at, token in enumerate(tokens_of(found["0"])):
        before = np.array([*PROMPT, *tokens_of(found["0"])[:at]], np.int32)
        last = run(core_of(model), [request("x", before, max_tokens=1, stop_tokens=())])["x"]
        assert token == last[0].topk_ids[0, 0]
    kept = replace(request("again", seed=9, stop_tokens=(), top_k=1), kept=kept_of(found["0"]))
    again = run(core_of(model), [kept])["again"]
    assert tokens_of(again) == tokens_of(found["0"])
    assert (joined(again, "provenance") == Provenance.VERIFIED).all()


def test_lower_priority_values_go_first_and_slots_are_bounded(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3, slots=2))
    for i in range(4):
        core.add(request(f"late{i}", priority=1, stop_tokens=()))
    core.add(request("first", stop_tokens=()))
    core.add(request("second", stop_tokens=()))
    core.step()
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.slots) == (2, 4, 2)
    ran = {c.request_id for c in core.flush()}
    assert ran <= {"first", "second"}
    run(core)


def test_requests_of_one_priority_go_in_their_order_whenever_they_arrive(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3, slots=2))
    asked = [("ahead", 1, 0), ("third", 0, 9), ("first", 0, 4), ("later", 0, 9), ("second", 0, 4)]
    for name, priority, order in asked:
        core.add(replace(request(name, priority=priority, stop_tokens=()), order=order))
    served: list[str] = []
    while core.has_work:
        served += [chunk.request_id for chunk in core.step() if chunk.request_id not in served]
    assert sorted(served[:2]) == ["first", "second"]
    assert sorted(served[2:4]) == ["later", "third"]
    assert served[4:] == ["ahead"]


def test_abort_frees_running_and_waiting_requests(tiny_qwen3: str) -> None:
    cache = RolloutCache(CacheConfig(max_bytes=1 << 20))
    core = core_of(load(tiny_qwen3, slots=2), cache)
    for name in "abc":
        core.add(request(name, stop_tokens=(), seed=1))
    core.step()
    for name in ("a", "c", "never seen"):
        core.abort(name)
        core.check()
    assert (core.stats().running, core.stats().waiting) == (1, 0)
    assert list(run(core)) == ["b"]
    assert cache.stats().rows == 0


def test_close_reports_everything_as_aborted(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3, slots=2))
    for name in "abc":
        core.add(request(name, stop_tokens=()))
    core.step()
    last = core.close()
    assert sorted(c.request_id for c in last) == ["a", "b", "c"]
    assert {c.finish_reason for c in last} == {"abort"}
    assert not core.has_work


def test_an_interrupted_request_reports_all_its_tokens_and_frees_its_slot(
    tiny_qwen3: str,
) -> None:
    core = core_of(load(tiny_qwen3, slots=1), chunk_tokens=8)
    core.add(request("a", seed=2, stop_tokens=()))
    core.add(request("waits", seed=3))
    (first,) = core.step()
    for _ in range(2):
        assert core.step() == []
    (last,) = core.interrupt("a")
    assert (len(last.tokens), last.finish_reason) == (2, "abort")
    drawn = tokens_of([first, last])
    (never,) = core.interrupt("waits")
    assert (len(never.tokens), never.finish_reason) == (0, "abort")
    assert core.interrupt("a") == core.interrupt("unknown") == []
    core.check()
    assert not core.has_work
    # Resumed as a prefix under the same seed, the response is what it would have been.
    whole = core_of(load(tiny_qwen3))
    whole.add(request("a", seed=2, stop_tokens=()))
    expected = tokens_of(run(whole)["a"])
    assert expected[:3] == drawn
    again = request("again", seed=2, stop_tokens=())
    core.add(replace(again, prefix_tokens=np.array(drawn, np.int32)))
    assert [*drawn, *tokens_of(run(core)["again"])] == expected
