"""Kept tokens in the torch engine: how they are accepted, replaced and reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch_cores
from enumerated_policies import policies
from new_weights import swap_weights
from tiny_models import STOP, VOCAB, make_qwen3
from torch_cores import check_against_hf, first, joined, kept_of, run
from tree_sources import RandomTrees

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError, RequestError
from asyncrl.engine.protocol import GenerateRequest, SamplingParams
from asyncrl.engine.torch.core import DecodeCore
from asyncrl.engine.torch.model import SlotModel
from asyncrl.rollout.trajectory import KeptTokens, Provenance

MAX_TOKENS = 40
NEW_SEED = 10**6


def load(path: str, slots: int = 8) -> SlotModel:
    return torch_cores.load(path, slots=slots)


def drifted(drift: float = 0.03) -> torch.nn.Module:
    """The current policy: the old one, moved a little."""
    return policies(drift)[1]


def core_of(
    model: SlotModel, source: RolloutCache | None = None, *, version: int = 0, **changes: Any
) -> DecodeCore:
    wide = {"max_step_tokens": 100, "max_prefill_tokens": 500, "top_k": 8}
    core = torch_cores.core_of(model, source, **(wide | changes))
    if version:  # of whatever weights the model has
        same = {name: value.clone() for name, value in model.module.state_dict().items()}
        swap_weights(core, same.items(), version)
    return core


def request(name: str, seed: int, *, top_k: int = 8, **fields: Any) -> GenerateRequest:
    return torch_cores.request(
        name, **({"seed": seed, "max_tokens": MAX_TOKENS, "top_k_logprobs": top_k} | fields)
    )


def old_texts(model: SlotModel, count: int, *, top_k: int = 8, **fields: Any) -> list[KeptTokens]:
    asked = [request(f"{i}", i, top_k=top_k, **fields) for i in range(count)]
    done = run(core_of(model, top_k=top_k), asked)
    return [kept_of(done[f"{i}"]) for i in range(count)]


def test_the_same_policy_accepts_everything_in_one_step(tiny_qwen3: str) -> None:
    """Ratios are 1 up to rounding: finished responses are reported at once and whole."""
    model = load(tiny_qwen3)
    texts = old_texts(model, 8, max_tokens=12)
    core = core_of(model)
    asked = [request(f"{i}", NEW_SEED + i, kept=k, max_tokens=12) for i, k in enumerate(texts)]
    done = run(core, asked)
    assert core.stats().steps == 1
    assert core.stats().tokens.generated == 0, "nothing had to be drawn"
    assert core.stats().tokens.drafted == 0
    reasons = set()
    for one, old in zip(asked, texts, strict=True):
        chunks = done[one.request_id]
        assert joined(chunks, "tokens").tolist() == old.tokens.tolist()
        assert (joined(chunks, "provenance") == Provenance.VERIFIED).all()
        assert chunks[-1].finish_reason == ("stop" if old.tokens[-1] == STOP else "length")
        reasons.add(chunks[-1].finish_reason)
        check_against_hf(make_qwen3(), one, chunks)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("source", ["none", "cache", "random trees"])
def test_a_drifted_policy_reports_its_own_numbers(tiny_qwen3: str, source: str) -> None:
    """Accepted, replaced and new tokens all have the current policy's log-probabilities."""
    model, new = load(tiny_qwen3), drifted()
    texts = old_texts(model, 16)
    drafts = {
        "none": None,
        "cache": RolloutCache(CacheConfig(max_bytes=1 << 20)),
        "random trees": RandomTrees(VOCAB),
    }[source]
    core = core_of(model, drafts)
    swap_weights(core, new.state_dict().items(), 3)
    asked = [
        request(f"{i}", NEW_SEED + i, kept=k, temperature=(1.0, 0.8)[i % 2])
        for i, k in enumerate(texts)
    ]
    done = run(core, asked)
    lengths = set()
    for one, old in zip(asked, texts, strict=True):
        chunks = done[one.request_id]
        provenance, tokens = joined(chunks, "provenance"), joined(chunks, "tokens")
        accepted = int((provenance == Provenance.VERIFIED).sum())
        lengths.add(accepted)
        assert (provenance[:accepted] == Provenance.VERIFIED).all()
        assert tokens[:accepted].tolist() == old.tokens[:accepted].tolist()
        if accepted < len(tokens):
            assert provenance[accepted] == Provenance.SAMPLED
            assert len(chunks[0].tokens) == accepted + 1
        assert {c.policy_version for c in chunks} == {3}
        assert chunks[-1].finish_reason == ("stop" if tokens[-1] == STOP else "length")
        check_against_hf(new, one, chunks)
    assert len(lengths) > 4


def test_a_vocabulary_of_fewer_than_k_tokens_is_listed_whole(tiny_qwen3: str) -> None:
    """The default K with fewer tokens: the rest of a list is padding, which changes nothing."""
    default = SamplingParams(1).top_k_logprobs
    assert default == EngineConfig().top_k_logprobs > VOCAB
    done = []
    for k in (VOCAB, default):
        texts = old_texts(load(tiny_qwen3), 12, top_k=k)
        core = core_of(load(tiny_qwen3), top_k=k)
        swap_weights(core, drifted(0.3).state_dict().items(), 3)
        asked = [request(f"{i}", NEW_SEED + i, top_k=k, kept=one) for i, one in enumerate(texts)]
        done.append(run(core, asked))
    accepted = [joined(chunks, "provenance") == Provenance.VERIFIED for chunks in done[0].values()]
    assert np.concatenate(accepted).any()
    assert not np.concatenate(accepted).all()
    for i in range(12):
        whole, padded = (one[f"{i}"] for one in done)
        for what in ("tokens", "logprobs", "provenance"):
            np.testing.assert_array_equal(joined(padded, what), joined(whole, what))
        ids, logprobs = joined(padded, "topk_ids"), joined(padded, "topk_logprobs")
        np.testing.assert_array_equal(ids[:, :VOCAB], joined(whole, "topk_ids"))
        assert ids.shape == logprobs.shape == (len(joined(whole, "tokens")), default)
        assert (ids[:, VOCAB:] == -1).all()
        assert np.isneginf(logprobs[:, VOCAB:]).all()
        assert [chunk.outside_top_k() for chunk in padded] == [0] * len(padded)


def test_new_tokens_depend_only_on_the_text_and_the_seed(tiny_qwen3: str) -> None:
    """Resuming after an accepted prefix equals resuming from a prefix: other KV is unused."""
    model, new = load(tiny_qwen3), drifted()
    texts = old_texts(model, 12, stop_tokens=())
    core = core_of(model)
    swap_weights(core, new.state_dict().items(), 1)
    asked = [
        request(f"{i}", NEW_SEED + i, kept=first(k, 20), stop_tokens=())
        for i, k in enumerate(texts)
    ]
    done = run(core, asked)
    all_kept = 0
    for one in asked:
        chunks = done[one.request_id]
        tokens = joined(chunks, "tokens").tolist()
        accepted = int((joined(chunks, "provenance") == Provenance.VERIFIED).sum())
        all_kept += accepted == 20
        # After a full acceptance the next token is the request's own draw already.
        known = accepted if accepted == 20 else accepted + 1
        prefix = np.array(tokens[:known], np.int32)
        again = run(core_of(model, version=1), [replace(one, kept=None, prefix_tokens=prefix)])
        assert joined(again[one.request_id], "tokens").tolist() == tokens[known:]
    assert 0 < all_kept < 12


def test_a_batch_changes_nothing(tiny_qwen3: str) -> None:
    """Verified rows share steps with decoding rows, prompts, siblings and each other."""
    model, new = load(tiny_qwen3, slots=5), drifted()
    texts = old_texts(model, 10)
    core = core_of(model, RolloutCache(CacheConfig(max_bytes=1 << 20)), max_prefill_tokens=90)
    swap_weights(core, new.state_dict().items(), 1)
    asked = [request(f"{i}", NEW_SEED + i, kept=k if i % 3 else None) for i, k in enumerate(texts)]
    done = run(core, asked)
    for one in asked:
        alone = run(core_of(model, version=1), [one])
        assert (
            joined(done[one.request_id], "tokens").tolist()
            == joined(alone[one.request_id], "tokens").tolist()
        )


def test_the_old_text_is_drafted_from_after_the_replaced_token(tiny_qwen3: str) -> None:
    """The draws are those of a policy that generates the old text again."""
    model = load(tiny_qwen3)
    old = old_texts(model, 1, top_k=VOCAB, stop_tokens=())[0]
    impossible = replace(old, topk_logprobs=old.topk_logprobs.copy())
    # The sixth token has a list of mass 1 without it, so it cannot be accepted.
    impossible.topk_logprobs[5] = -np.inf
    impossible.topk_logprobs[5, (old.topk_ids[5] != old.tokens[5]).argmax()] = 0.0
    core = core_of(model, top_k=VOCAB)
    # The same seed, on purpose.
    done = run(core, [request("a", 0, top_k=VOCAB, kept=impossible, stop_tokens=())])
    tokens = joined(done["a"], "tokens").tolist()
    plain = core_of(model, top_k=VOCAB)
    prefix = np.array(tokens[:6], np.int32)
    run(plain, [request("a", 0, top_k=VOCAB, prefix_tokens=prefix, stop_tokens=())])
    assert tokens[:5] == old.tokens[:5].tolist()
    assert core.stats().tokens.drafted > 0
    assert core.stats().steps <= 1 + plain.stats().steps
    if tokens[5] == old.tokens[5]:  # the same token: so are all later ones
        assert tokens == old.tokens.tolist()
        assert core.stats().steps <= 1 + -(-(MAX_TOKENS - 6) // 7)


def test_verdicts_use_fresh_numbers_under_every_version(tiny_qwen3: str) -> None:
    """The same kept tokens and seed: one verdict per version."""
    model, new = load(tiny_qwen3), drifted(0.3)
    texts = old_texts(model, 24)
    verdicts = []
    for version in (1, 1, 2):
        core = core_of(model)
        swap_weights(core, new.state_dict().items(), version)
        asked = [request(f"{i}", NEW_SEED + i, kept=k) for i, k in enumerate(texts)]
        done = run(core, asked)
        verdicts.append([int((joined(done[r.request_id], "provenance") == 2).sum()) for r in asked])
    assert verdicts[0] == verdicts[1]
    assert verdicts[0] != verdicts[2]


def test_weights_may_change_while_a_request_waits(tiny_qwen3: str) -> None:
    model, new = load(tiny_qwen3, slots=1), drifted()
    old = old_texts(model, 1)[0]
    core = core_of(model)
    core.add(request("runs", 5, stop_tokens=()))
    core.step()
    waits = request("waits", NEW_SEED, kept=old)
    core.add(waits)
    swap_weights(core, new.state_dict().items(), 4)
    chunks = run(core, [])["waits"]
    assert {c.policy_version for c in chunks} == {4}
    check_against_hf(new, waits, chunks)


def test_admission_is_bounded_by_logits(tiny_qwen3: str) -> None:
    """Two texts of twenty tokens need 42 positions: with room for 25, they go one by one."""
    model = load(tiny_qwen3)
    texts = [first(k, 20) for k in old_texts(model, 4, stop_tokens=())]
    core = core_of(model, logits_bytes=25 * 4 * VOCAB)
    for i, kept in enumerate(texts):
        core.add(request(f"{i}", NEW_SEED + i, kept=kept, stop_tokens=(), max_tokens=30))
    running = []
    for _ in texts:
        core.step()
        running.append(core.stats().running)
    assert running == [1, 2, 3, 4]
    core.close()
    core = core_of(model, logits_bytes=5 * 4 * VOCAB)  # one alone always goes
    run(core, [request("a", NEW_SEED, kept=texts[0], stop_tokens=())])


def test_more_lenience_accepts_more(tiny_qwen3: str) -> None:
    model, new = load(tiny_qwen3), drifted(0.3)
    texts = old_texts(model, 40)
    core = core_of(model)
    swap_weights(core, new.state_dict().items(), 1)
    kept = {}
    for lenience in (None, 1.0, 3.0, 1e9):
        asked = [
            request(f"{i}", NEW_SEED + i, kept=replace(k, lenience=lenience))
            for i, k in enumerate(texts)
        ]
        done = run(core, asked)
        for one in asked:
            check_against_hf(new, one, done[one.request_id])
        kept[lenience] = sum(int((joined(c, "provenance") == 2).sum()) for c in done.values())
    assert kept[1.0] < kept[3.0] < kept[1e9] == sum(map(len, texts))
    assert kept[None] > 0


def test_empty_kept_tokens_make_an_ordinary_request(tiny_qwen3: str) -> None:
    model = load(tiny_qwen3)
    nothing = first(old_texts(model, 1)[0], 0)
    core = core_of(model)
    done = run(core, [request("a", 3, kept=nothing), request("b", 3), request("c", 4)])
    assert joined(done["a"], "tokens").tolist() == joined(done["b"], "tokens").tolist()
    assert not (joined(done["a"], "provenance") == Provenance.VERIFIED).any()


def test_kept_tokens_after_a_prefix(tiny_qwen3: str) -> None:
    model = load(tiny_qwen3)
    old = old_texts(model, 1, stop_tokens=())[0]
    rest = KeptTokens(
        old.tokens[6:],
        old.logprobs[6:],
        old.topk_ids[6:],
        old.topk_logprobs[6:],
        old.noise_seeds[6:],
    )
    one = request("a", NEW_SEED, prefix_tokens=old.tokens[:6], kept=rest, stop_tokens=())
    chunks = run(core_of(model), [one])["a"]
    assert joined(chunks, "tokens").tolist() == old.tokens[6:].tolist()
    check_against_hf(make_qwen3(), one, chunks)


def test_a_stop_token_among_the_kept_ends_the_response(tiny_qwen3: str) -> None:
    """The stop tokens differ from those under which the tokens were drawn."""
    model = load(tiny_qwen3)
    old = old_texts(model, 1, stop_tokens=())[0]
    stop = int(old.tokens[4])
    ends = old.tokens.tolist().index(stop) + 1
    chunks = run(core_of(model), [request("a", NEW_SEED, kept=old, stop_tokens=(stop,))])["a"]
    assert joined(chunks, "tokens").tolist() == old.tokens[:ends].tolist()
    assert chunks[-1].finish_reason == "stop"


def test_an_abort_right_after_a_verification(tiny_qwen3: str) -> None:
    model = load(tiny_qwen3, slots=2)
    old = first(old_texts(model, 1, stop_tokens=())[0], 12)
    core = core_of(model)
    core.add(request("a", NEW_SEED, kept=old, stop_tokens=()))
    assert len(core.step()[0].tokens) == 13
    core.abort("a")
    core.check()
    assert not core.has_work


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.full(MAX_TOKENS + 1, 1, np.int32)}, "41 kept tokens"),
        ({"tokens": np.array([VOCAB] * 3, np.int32)}, "vocabulary"),
        ({"logprobs": np.zeros(2, np.float32)}, "as many logprobs"),
        ({"noise_seeds": np.zeros(2, np.uint64)}, "noise seeds"),
        ({"logprobs": np.array([0, np.nan, 0], np.float32)}, "finite"),
        ({"topk_ids": np.zeros((3, 1), np.int32)}, r"two tables \[3, 2\]"),
        (
            {"topk_ids": np.zeros((3, 0), np.int32), "topk_logprobs": np.zeros((3, 0), np.float32)},
            "engine.top_k_logprobs",
        ),
        ({"topk_ids": np.array([[1, 1]] * 3, np.int32)}, "twice"),
        ({"topk_ids": np.array([[1, VOCAB]] * 3, np.int32)}, "vocabulary"),
        ({"topk_logprobs": np.full((3, 2), np.nan, np.float32)}, "nan"),
        ({"topk_logprobs": np.full((3, 2), -0.5, np.float32)}, "mass 1.2131"),
        ({"lenience": 0.0}, "lenience"),
        ({"lenience": float("nan")}, "lenience"),
    ],
)
def test_impossible_kept_tokens_are_refused(
    tiny_qwen3: str, changes: dict[str, Any], message: str
) -> None:
    good = KeptTokens(
        np.array([1, 2, 3], np.int32),
        np.zeros(3, np.float32),
        np.array([[1, 2]] * 3, np.int32),
        np.full((3, 2), -1, np.float32),
        np.zeros(3, np.uint64),
    )
    core = core_of(load(tiny_qwen3), top_k=2)
    with pytest.raises(RequestError, match=f"'bad'.*{message}"):
        core.add(request("bad", 1, top_k=2, kept=replace(good, **changes)))
    core.add(request("good", 1, top_k=2, kept=good))


def test_weights_that_are_not_finite_are_reported(tiny_qwen3: str) -> None:
    model = load(tiny_qwen3)
    old = old_texts(model, 1)[0]
    core = core_of(model)
    broken = dict(make_qwen3().state_dict())
    broken["model.norm.weight"] = torch.full_like(broken["model.norm.weight"], torch.nan)
    swap_weights(core, broken.items(), 1)
    core.add(request("a", NEW_SEED, kept=old))
    with pytest.raises(EngineError, match="not finite for requests"):
        core.step()
