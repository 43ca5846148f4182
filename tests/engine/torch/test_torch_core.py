"""DecodeCore: log-probabilities, batching, drafting, weight swaps, limits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from new_weights import swap_weights
from tiny_models import STOP, VOCAB, make_qwen3

from cache.config import CacheConfig
from cache.tree import RolloutCache
from engine.drafting.fixed_budget import FixedBudget
from engine.drafting.source import DraftSource
from engine.errors import EngineError, RequestError, WeightsError
from engine.protocol import GenerateRequest, SamplingParams, ScoreRequest, TokenChunk
from engine.torch.core import CoreSettings, DecodeCore
from engine.torch.model import SlotModel, load_model
from rollout.trajectory import IntArray, Provenance

PROMPT = np.array([1, 2, 3], np.int32)
NONE = np.empty(0, np.int32)
Loader = Callable[..., SlotModel]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(path: str, slots: int = 4, max_len: int = 64) -> SlotModel:
    cpu = torch.device("cpu")
    return load_model(path, slots=slots, max_len=max_len, device=cpu, dtype=torch.float32)


def core_of(model: SlotModel, source: DraftSource | None = None, **changes: int) -> DecodeCore:
    settings = CoreSettings(
        max_step_tokens=32, max_draft_tokens=6, max_prefill_tokens=64, chunk_tokens=4, top_k=4
    )
    settings = replace(settings, **changes)
    planner = FixedBudget(
        max_step_tokens=settings.max_step_tokens or 0, max_draft_tokens=settings.max_draft_tokens
    )
    return DecodeCore(model, settings, source, seed=7, planner=planner)


def request(name: str, prompt: IntArray = PROMPT, **changes: object) -> GenerateRequest:
    sampling = {"max_tokens": 12, "stop_tokens": (STOP,), "top_k_logprobs": 4}
    ours = {k: changes.pop(k) for k in ("cache_key", "prefix_tokens", "draft_tokens", "priority")
            if k in changes}  # fmt: skip
    params = SamplingParams(**(sampling | changes))
    return GenerateRequest(
        request_id=name, prompt_tokens=prompt, sampling=params, **({"cache_key": "p"} | ours)
    )


def drain(core: DecodeCore) -> dict[str, list[TokenChunk]]:
    out: dict[str, list[TokenChunk]] = defaultdict(list)
    for _ in range(10_000):
        for chunk in core.step():
            out[chunk.request_id].append(chunk)
        core.check()
        if not core.has_work:
            return out
    raise AssertionError("the core never became idle")


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    return [int(t) for chunk in chunks for t in chunk.tokens]


def plain_logprobs(
    module: torch.nn.Module, prompt: IntArray, response: list[int], temperature: float = 1.0
) -> np.ndarray:
    """`[L, V]` from one ordinary HF forward pass over the whole text."""
    ids = torch.tensor([[*prompt.tolist(), *response]])
    with torch.no_grad():
        logits = module(ids).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).numpy()


def mixed_requests(count: int = 12) -> list[GenerateRequest]:
    rng = np.random.default_rng(3)
    out = []
    for i in range(count):
        prompt = PROMPT if i % 2 else rng.integers(0, STOP, rng.integers(1, 9)).astype(np.int32)
        temperature = (1.0, 0.7, 1.4)[i % 3]
        out.append(request(f"r{i}", prompt, seed=i, temperature=temperature, cache_key=f"k{i % 2}"))
    return out


@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_llama"])
def test_logprobs_equal_a_plain_forward_pass(family: str, request: pytest.FixtureRequest) -> None:
    from transformers import AutoModelForCausalLM

    path = request.getfixturevalue(family)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    core = core_of(load(path), RolloutCache(CacheConfig(max_bytes=1 << 20)))
    requests = mixed_requests()
    for r in requests:
        core.add(r)
    chunks = drain(core)
    drafted = 0
    for r in requests:
        written = tokens_of(chunks[r.request_id])
        expected = plain_logprobs(plain, r.prompt_tokens, written, r.sampling.temperature)
        got = np.concatenate([c.logprobs for c in chunks[r.request_id]])
        np.testing.assert_allclose(got, expected[np.arange(len(written)), written], atol=1e-4)
        top = np.concatenate([c.topk_logprobs for c in chunks[r.request_id]])
        ids = np.concatenate([c.topk_ids for c in chunks[r.request_id]])
        np.testing.assert_allclose(top, -np.sort(-expected, axis=1)[:, :4], atol=1e-4)
        np.testing.assert_allclose(np.take_along_axis(expected, ids, 1), top, atol=1e-4)
        provenance = np.concatenate([c.provenance for c in chunks[r.request_id]])
        drafted += int((provenance == Provenance.DRAFTED).sum())
    assert drafted == core.stats().tokens.accepted > 0


@pytest.mark.parametrize("source", ["none", "cache", "old", "wrong"])
def test_drafting_cannot_change_what_a_seed_writes(tiny_qwen3: str, source: str) -> None:
    """The draw at a position depends on (seed, position) only, so every token must be the same."""
    model = load(tiny_qwen3)
    plain = core_of(model, max_draft_tokens=0)
    requests = mixed_requests(16)
    for r in requests:
        plain.add(r)
    expected = {name: tokens_of(chunks) for name, chunks in drain(plain).items()}
    rng = np.random.default_rng(0)
    cache = RolloutCache(CacheConfig(max_bytes=1 << 20, min_match=1, min_probability=0.0))
    core = core_of(model, cache if source == "cache" else None)
    for r in requests:
        old = NONE
        if source == "old":
            old = np.array(expected[r.request_id], np.int32)
            old[len(old) // 2 :][:1] = 0  # diverges once, and must be found again
        elif source == "wrong":
            old = rng.integers(0, VOCAB, 12).astype(np.int32)
        core.add(replace(r, draft_tokens=old))
    assert {name: tokens_of(chunks) for name, chunks in drain(core).items()} == expected
    stats = core.stats()
    assert stats.tokens.generated == sum(map(len, expected.values()))
    assert (stats.tokens.drafted > 0) == (source != "none")
    if source == "old":
        assert stats.steps < plain.stats().steps


def test_a_right_old_continuation_is_written_in_few_steps(tiny_qwen3: str) -> None:
    model = load(tiny_qwen3)
    first = core_of(model)
    first.add(request("a", seed=5, max_tokens=30, stop_tokens=()))
    old = np.array(tokens_of(drain(first)["a"]), np.int32)
    again = core_of(model)
    again.add(request("a", seed=5, max_tokens=30, stop_tokens=(), draft_tokens=old))
    chunks = drain(again)["a"]
    assert tokens_of(chunks) == old.tolist()
    assert again.stats().steps <= 1 + -(-29 // 7)
    broken = np.delete(old, 10)  # from here on it is off by one
    third = core_of(model)
    third.add(request("a", seed=5, max_tokens=30, stop_tokens=(), draft_tokens=broken))
    assert tokens_of(drain(third)["a"]) == old.tolist()
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
    for name, more in drain(together).items():
        out[name] += more
    for i in range(5):
        alone = core_of(model)
        alone.add(request("x", seed=i))
        assert tokens_of(out[f"s{i}"]) == tokens_of(drain(alone)["x"])


def test_a_resumed_prefix_goes_on_as_the_whole_would(tiny_qwen3: str) -> None:
    model = load(tiny_qwen3)
    whole = core_of(model)
    whole.add(request("a", seed=11, stop_tokens=()))
    written = tokens_of(drain(whole)["a"])
    rest = core_of(model)
    prefix = np.array(written[:5], np.int32)
    rest.add(request("a", seed=11, stop_tokens=(), prefix_tokens=prefix))
    assert tokens_of(drain(rest)["a"]) == written[5:]


def test_ends_are_reported_once_with_their_reason(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3), RolloutCache(CacheConfig(max_bytes=1 << 20)))
    for i in range(40):
        core.add(request(f"r{i}", seed=i, max_tokens=9))
    reasons = set()
    for chunks in drain(core).values():
        assert all(c.finish_reason is None for c in chunks[:-1])
        written = tokens_of(chunks)
        stopped = chunks[-1].finish_reason == "stop"
        assert stopped == (written[-1] == STOP)
        assert STOP not in written[:-1]
        assert len(written) == 9 or stopped
        reasons.add(chunks[-1].finish_reason)
    assert reasons == {"stop", "length"}


def test_top_k_beyond_the_nucleus_is_padded(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3))
    core.add(request("a", top_p=0.3, seed=1))
    chunks = drain(core)["a"]
    ids = np.concatenate([c.topk_ids for c in chunks])
    top = np.concatenate([c.topk_logprobs for c in chunks])
    assert (ids[:, -1] == -1).any()
    assert ((ids == -1) == np.isneginf(top)).all()
    np.testing.assert_allclose(np.exp(top).sum(1), 1, atol=1e-5)


def test_better_priority_goes_first_and_slots_are_bounded(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3, slots=2))
    for i in range(4):
        core.add(request(f"late{i}", priority=1))
    core.add(request("first"))
    core.add(request("second"))
    core.step()
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.slots) == (2, 4, 2)
    ran = {c.request_id for c in core.flush()}
    assert ran <= {"first", "second"}
    drain(core)


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
    assert list(drain(core)) == ["b"]
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


def test_a_swap_in_flight_keeps_kv_and_never_mixes_versions(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3), chunk_tokens=8)
    core.add(request("a", seed=2, stop_tokens=()))
    assert [len(c.tokens) for c in core.step()] == [1], "the first token is told at once"
    for _ in range(4):
        assert core.step() == []
    other = make_qwen3(seed=1)
    before = swap_weights(core, other.state_dict().items(), 3)
    assert [(len(c.tokens), c.policy_version) for c in before] == [(4, 0)]
    after = drain(core)["a"]
    assert {c.policy_version for c in after} == {3}
    # New requests see the new weights only, siblings of a row with old KV included.
    core.add(request("b", seed=2, stop_tokens=()))
    fresh = drain(core)["b"]
    written = tokens_of(fresh)
    expected = plain_logprobs(other, PROMPT, written)[np.arange(12), written]
    np.testing.assert_allclose(np.concatenate([c.logprobs for c in fresh]), expected, atol=1e-4)


def test_kv_of_old_weights_is_not_shared_with_new_requests(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3))
    core.add(request("old", seed=2, stop_tokens=()))
    core.step()
    other = make_qwen3(seed=1)
    swap_weights(core, other.state_dict().items(), 1)
    core.add(request("new", seed=3, stop_tokens=()))
    chunks = drain(core)["new"]
    written = tokens_of(chunks)
    expected = plain_logprobs(other, PROMPT, written)[np.arange(12), written]
    np.testing.assert_allclose(np.concatenate([c.logprobs for c in chunks]), expected, atol=1e-4)


def test_wrong_weights_change_nothing(tiny_qwen3: str, tiny_llama: str) -> None:
    core = core_of(load(tiny_qwen3))
    model = core._model.module
    before = {n: p.clone() for n, p in model.named_parameters()}
    good = dict(make_qwen3(seed=1).state_dict())
    name = "model.layers.0.mlp.up_proj.weight"
    missing = {n: t for n, t in good.items() if n != name}
    cases = {
        "missing": missing,
        "unexpected": good | {"model.extra": torch.zeros(1)},
        "shape": good | {name: torch.zeros(3, 3)},
        "tied": good | {"lm_head.weight": good["lm_head.weight"] + 1},
    }
    for what, weights in cases.items():
        with pytest.raises(WeightsError, match=what):
            swap_weights(core, weights.items(), 1)
    assert core.policy_version == 0
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    # One name of a tied pair is enough.
    swap_weights(core, ((n, t) for n, t in good.items() if n != "lm_head.weight"), 1)
    assert torch.equal(model.lm_head.weight, good["lm_head.weight"])


@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_llama"])
def test_score_follows_the_sampling_distribution(
    family: str, request: pytest.FixtureRequest
) -> None:
    model = load(request.getfixturevalue(family))
    core = core_of(model)
    requests = [
        replace(r, sampling=replace(r.sampling, top_p=0.8 if i % 4 == 0 else 1.0))
        for i, r in enumerate(mixed_requests())
    ]
    for r in requests:
        core.add(r)
    chunks = drain(core)
    asked = [
        ScoreRequest(
            r.request_id,
            r.prompt_tokens,
            np.array(tokens_of(chunks[r.request_id]), np.int32),
            r.sampling,
        )
        for r in requests
    ]
    asked.append(ScoreRequest("nothing", PROMPT, NONE, SamplingParams(4, top_k_logprobs=4)))
    for r, score in zip(asked, core.score(asked), strict=True):
        assert score.request_id == r.request_id
        assert score.topk_ids.shape == (len(r.tokens), 4)
        if r.request_id == "nothing":
            continue
        drawn = chunks[r.request_id]
        np.testing.assert_allclose(
            score.logprobs, np.concatenate([c.logprobs for c in drawn]), atol=1e-4
        )
        np.testing.assert_allclose(
            score.topk_logprobs, np.concatenate([c.topk_logprobs for c in drawn]), atol=1e-4
        )
        assert not (score.tail_ids[:, None] == score.topk_ids)[score.tail_ids >= 0].any()
        listed = np.exp(score.topk_logprobs).sum(axis=1)
        assert (np.exp(score.tail_logprobs) <= 1 - listed + 1e-5).all()
        assert (np.isneginf(score.tail_logprobs) == (score.tail_ids < 0)).all()


def test_tail_draws_depend_on_seed_version_and_position(tiny_qwen3: str) -> None:
    """Asked again they are the same; a whole vocabulary listed leaves nothing outside."""
    core = core_of(load(tiny_qwen3), top_k=VOCAB)
    text = np.arange(9, dtype=np.int32)

    def tails(seed: int, k: int = 2) -> list[int]:
        asked = ScoreRequest("a", PROMPT, text, SamplingParams(9, top_k_logprobs=k, seed=seed))
        [score] = core.score([asked])
        return score.tail_ids.tolist()

    assert tails(1) == tails(1) != tails(2)
    assert tails(1, k=VOCAB) == [-1] * 9
    assert -1 not in tails(1, k=0)
    before = tails(1)
    core.policy_version += 1
    assert tails(1) != before
    unseeded = ScoreRequest("a", PROMPT, text, SamplingParams(9, top_k_logprobs=2))
    [one], [other] = core.score([unseeded]), core.score([unseeded])
    assert one.tail_ids.tolist() != other.tail_ids.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "greater than 0"),
        ({"temperature": float("nan")}, "greater than 0"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 62}, "max_model_len"),
        ({"top_k_logprobs": 5}, "top_k_logprobs"),
        ({"stop_tokens": (VOCAB,)}, "stop_tokens"),
        ({"prompt": NONE}, "empty"),
        ({"prompt": np.array([VOCAB], np.int32)}, "vocabulary"),
        ({"prefix_tokens": np.zeros(12, np.int32)}, "nothing to write"),
    ],
)
def test_impossible_requests_are_named_and_refused(
    tiny_qwen3: str, changes: dict[str, object], message: str
) -> None:
    core = core_of(load(tiny_qwen3))
    with pytest.raises(RequestError, match=f"'bad'.*{message}"):
        core.add(request("bad", **changes))
    assert not core.has_work


def test_an_id_in_use_is_refused(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3))
    core.add(request("a"))
    with pytest.raises(RequestError, match="being served"):
        core.add(request("a"))


def test_weights_that_are_not_finite_are_reported(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3))
    broken = dict(make_qwen3().state_dict())
    broken["model.norm.weight"] = torch.full_like(broken["model.norm.weight"], torch.nan)
    swap_weights(core, broken.items(), 1)
    core.add(request("a"))
    with pytest.raises(EngineError, match="not finite for requests"):
        drain(core)


def test_an_interrupted_request_reports_all_that_it_drew_and_frees_its_slot(
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
    # Gone on with as a prefix under the same seed it is what it would have been.
    whole = core_of(load(tiny_qwen3))
    whole.add(request("a", seed=2, stop_tokens=()))
    expected = tokens_of(drain(whole)["a"])
    assert expected[:3] == drawn
    again = request("again", seed=2, stop_tokens=())
    core.add(replace(again, prefix_tokens=np.array(drawn, np.int32)))
    assert [*drawn, *tokens_of(drain(core)["again"])] == expected
