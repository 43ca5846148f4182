"""Responses of several turns in the torch engine: what ends a turn, and what is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cache_check import check
from enumerated_policies import PIECES, policies
from new_weights import swap_weights
from tiny_models import STOP
from torch_cores import core_of, joined, load, request, run, tokens_of

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import Drafts, RolloutCache
from asyncrl.engine.drafting.trees import TokenTrees, plant
from asyncrl.engine.errors import RequestError
from asyncrl.engine.protocol import GenerateRequest, TokenChunk
from asyncrl.engine.sampling.stopping import StopRule
from asyncrl.engine.torch import drafting, step_sampling
from asyncrl.engine.torch.core import DecodeCore
from asyncrl.rollout.trajectory import KeptTokens, Provenance, SampleId, TrajectoryBuilder

TURNS, LONGEST = 4, 48
STOPS = (STOP, 3, 5)
ANSWER = np.array([STOP, 2, 5], np.int32)
"""Some of what is observed are stop tokens."""


def turn(name: str, builder: TrajectoryBuilder, seed: int, **changes: object) -> GenerateRequest:
    fields = {"max_tokens": LONGEST, "stop_tokens": STOPS, "seed": seed} | changes
    return request(name, prefix_tokens=builder.tokens(), turn_start=builder.turn_start, **fields)


def new_builder() -> TrajectoryBuilder:
    return TrajectoryBuilder(SampleId(0, 0), "p", np.array([1, 2, 3], np.int32))


def played(
    core: DecodeCore, first_seed: int, turns: int = TURNS, **changes: object
) -> TrajectoryBuilder:
    """A response of some turns, each but the last one answered."""
    builder = new_builder()
    for number in range(turns):
        for chunk in run(core, [turn("t", builder, first_seed + number, **changes)])["t"]:
            chunk.append_to(builder)
        if number + 1 < turns:
            builder.append_observed(ANSWER)
    return builder


def verdict(core: DecodeCore, kept: KeptTokens, **changes: object) -> list[TokenChunk]:
    asked = turn("v", new_builder(), 10**6, kept=kept, **changes)
    return run(core, [asked])["v"]


def test_the_same_policy_accepts_all_turns_and_the_last_stop_ends_it(tiny_qwen3: str) -> None:
    model = load(tiny_qwen3)
    for seed in range(6):
        builder = played(core_of(model), 100 * seed)
        kept = builder.kept()
        core = core_of(model)
        chunks = verdict(core, kept)
        assert core.stats().steps == 1
        assert core.stats().tokens.generated == 0
        assert tokens_of(chunks) == kept.tokens.tolist()
        assert chunks[-1].finish_reason == "stop"
        observed = joined(chunks, "provenance") == Provenance.OBSERVED
        assert observed.tolist() == kept.observed.tolist()
        assert observed.sum() == 3 * len(ANSWER)
        assert (joined(chunks, "provenance")[~observed] == Provenance.VERIFIED).all()
        again = new_builder()
        for chunk in chunks:
            chunk.append_to(again)
        assert again.turn_start == builder.turn_start
        for name in ("tokens", "topk_ids", "noise_seeds", "observed"):
            np.testing.assert_array_equal(getattr(again.kept(), name), getattr(kept, name))
        for name in ("logprobs", "topk_logprobs"):
            here = getattr(again.kept(), name)
            assert (here[observed] == getattr(kept, name)[observed]).all()


def test_stops_of_earlier_turns_are_seen_by_a_mutant(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_qwen3)
    kept = played(core_of(model), 0).kept()
    monkeypatch.setattr(step_sampling, "turn_start", lambda *_: 0)
    chunks = verdict(core_of(model), kept)
    assert len(tokens_of(chunks)) < len(kept)


def test_text_that_ends_with_an_observation_goes_on_with_a_new_turn(tiny_qwen3: str) -> None:
    model = load(tiny_qwen3)
    builder = played(core_of(model), 3)
    builder.append_observed(ANSWER)
    chunks = verdict(core_of(model), builder.kept())
    kept, tokens = builder.kept(), tokens_of(chunks)
    assert tokens[: len(kept)] == kept.tokens.tolist()
    assert len(tokens) > len(kept)
    alone = run(core_of(model), [turn("v", builder, 10**6)])["v"]
    assert tokens[len(kept) :] == tokens_of(alone)
    assert chunks[-1].finish_reason == alone[-1].finish_reason


def test_a_changed_turn_keeps_no_observation(tiny_qwen3: str) -> None:
    """What was accepted are whole turns with their answers, then part of one."""
    model, changed = load(tiny_qwen3), 0
    texts = [played(core_of(model), 50 * i).kept() for i in range(12)]
    core = core_of(model, RolloutCache(CacheConfig(max_bytes=1 << 20)))
    swap_weights(core, policies(0.3)[1].state_dict().items(), 1)
    for kept in texts:
        chunks = verdict(core, kept)
        provenance, tokens = joined(chunks, "provenance"), joined(chunks, "tokens")
        fresh = np.flatnonzero(provenance < Provenance.VERIFIED)
        accepted = int(fresh[0]) if len(fresh) else len(tokens)
        changed += accepted < len(kept)
        assert tokens[:accepted].tolist() == kept.tokens[:accepted].tolist()
        assert (provenance == Provenance.OBSERVED)[:accepted].tolist() == (
            kept.observed[:accepted].tolist()
        )
        assert not (provenance[accepted:] == Provenance.OBSERVED).any()
        if accepted < len(kept):
            assert not kept.observed[accepted], "a turn ends with its answer"
            assert not np.isin(tokens[accepted:-1], STOPS).any()
    assert changed > 3


LIMITED = {"max_turn_tokens": 3, "stop_tokens": (STOP,)}


def test_the_limit_begins_again_with_each_accepted_turn(tiny_qwen3: str) -> None:
    model, cut = load(tiny_qwen3), 0
    for seed in range(4):
        builder = played(core_of(model), 100 * seed, **LIMITED)
        kept, last = builder.kept(), len(builder) - builder.turn_start
        chunks = verdict(core_of(model), kept, **LIMITED)
        assert tokens_of(chunks) == kept.tokens.tolist()
        assert chunks[-1].finish_reason == ("stop" if kept.tokens[-1] == STOP else "length")
        cut += last == 3
        builder.append_observed(ANSWER)
        chunks = verdict(core_of(model), builder.kept(), **LIMITED)
        alone = run(core_of(model), [turn("v", builder, 10**6, **LIMITED)])["v"]
        assert tokens_of(chunks) == builder.tokens().tolist() + tokens_of(alone)
        assert chunks[-1].finish_reason == alone[-1].finish_reason
    assert cut > 0


def test_a_changed_turn_ends_at_the_limit_from_its_own_beginning(tiny_qwen3: str) -> None:
    """Drafts of the whole cache included."""
    model, lengths = load(tiny_qwen3), []
    texts = [played(core_of(model), 50 * i, **LIMITED).kept() for i in range(12)]
    cache = RolloutCache(CacheConfig(max_bytes=1 << 20, min_match=1, min_probability=0.0))
    core = core_of(model, cache)
    swap_weights(core, policies(0.3)[1].state_dict().items(), 1)
    for kept in texts:
        again = new_builder()
        for chunk in (chunks := verdict(core, kept, **LIMITED)):
            chunk.append_to(again)
        length = len(again) - again.turn_start
        stopped = again.tokens()[-1] == STOP
        assert length == 3 or (stopped and length < 3)
        assert chunks[-1].finish_reason == ("stop" if stopped else "length")
        lengths += [length] if 0 < again.turn_start < len(again) < len(kept) else []
    assert 3 in lengths, "no later turn changed"


def test_a_turn_beyond_its_limit_is_refused(tiny_qwen3: str) -> None:
    core = core_of(load(tiny_qwen3))
    kept = played(core, 0, max_turn_tokens=5, stop_tokens=()).kept()
    with pytest.raises(RequestError, match="a turn of at least 5 tokens exceeds max_turn_tokens=4"):
        core.add(turn("v", new_builder(), 1, kept=kept, max_turn_tokens=4))
    prefix = np.array([9, 9, 9, 7, 8], np.int32)
    asked = {"prefix_tokens": prefix, "turn_start": 3}
    with pytest.raises(RequestError, match="a turn of at least 3 tokens"):
        core.add(request("a", max_turn_tokens=2, **asked))
    (chunks,) = run(core, [request("b", max_turn_tokens=4, stop_tokens=(), **asked)]).values()
    assert (len(tokens_of(chunks)), chunks[-1].finish_reason) == (2, "length")


RULE = StopRule.of(("ab",), PIECES)
CALLS = np.array([0, 1], np.int32)
""""ab" as two tokens."""


def test_stop_strings_begin_anew_with_each_turn(tiny_qwen3: str) -> None:
    """The string of an earlier turn, and one that reaches over an observation, end nothing."""
    model = load(tiny_qwen3)
    prefix = np.array([0, 1, 7, 0], np.int32)  # "ab", "aa", then "a" of what was observed
    by_rule = {"stop_rule": RULE, "stop_tokens": (), "max_tokens": 20}
    with pytest.raises(RequestError, match="contains a stop string"):
        core_of(model).add(request("a", prefix_tokens=prefix, turn_start=0, **by_rule))
    seen = 0
    for seed in range(30):
        asked = request("a", prefix_tokens=prefix, turn_start=4, seed=seed, **by_rule)
        text = tokens_of(run(core_of(model), [asked])["a"])
        free = replace(asked, sampling=replace(asked.sampling, stop_rule=None))
        whole = tokens_of(run(core_of(model), [free])["a"])
        end, _ = RULE.follow(RULE.start, np.array(whole))
        assert text == whole[:end]
        over = RULE.follow(RULE.follow(RULE.start, np.array([0]))[1], np.array(whole))[0]
        seen += over is not None and over != end
    assert seen > 0, "no turn begins with the rest of a string"


def test_stop_strings_of_kept_turns(tiny_qwen3: str) -> None:
    """As for stop tokens; the rule's state after an observation is the first one."""
    model, by_rule = load(tiny_qwen3), {"stop_rule": RULE, "stop_tokens": ()}
    ended = 0
    for seed in range(8):
        core, builder = core_of(model), new_builder()
        for number in range(2):
            asked = turn("t", builder, 10 * seed + number, **by_rule)
            for chunk in run(core, [asked])["t"]:
                chunk.append_to(builder)
            if number == 0 and len(builder) < LONGEST - 5:
                builder.append_observed(np.array([0, 1, 0], np.int32))  # "aba"
            else:
                break
        kept = builder.kept()
        chunks = verdict(core_of(model), kept, **by_rule)
        assert tokens_of(chunks) == kept.tokens.tolist()
        ended += chunks[-1].finish_reason == "stop" and builder.turn_start > 0
    assert ended > 2


@pytest.mark.parametrize("verified", [False, True])
def test_later_turns_are_drafted_and_nothing_past_a_stop(
    tiny_qwen3: str, verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From what others said after the same answer, in turns of requests or of kept tokens."""
    given: list[Drafts] = []

    def watched(drafts: Drafts, *others: Any) -> TokenTrees:
        given.append(drafts)
        return plant(drafts, *others)

    model = load(tiny_qwen3)
    cache = RolloutCache(CacheConfig(max_bytes=1 << 20, min_match=1, min_probability=0.0))
    core = core_of(model, None if verified else cache)
    texts = [played(core, 10 * i) for i in range(6)]
    if verified:
        core = core_of(model, cache)
        for text in texts:
            verdict(core, text.kept())
    monkeypatch.setattr(drafting, "plant", watched)
    before = core.stats().tokens.accepted
    again = [played(core, 10 * i) for i in range(6)]
    assert [one.tokens().tolist() for one in again] == [one.tokens().tolist() for one in texts]
    later = sum(one.count(Provenance.DRAFTED) for one in again)
    assert core.stats().tokens.accepted - before == later > 20
    for drafts in given:
        first = np.repeat(drafts.offsets[:-1], np.diff(drafts.offsets))
        below = drafts.parents >= 0
        assert not np.isin(drafts.tokens[(first + drafts.parents)[below]], STOPS).any()
    check(cache)


def test_an_earlier_continuation_is_drafted_up_to_its_stop(tiny_qwen3: str) -> None:
    model = load(tiny_qwen3)
    text = played(core_of(model), 0)
    core = core_of(model)
    run(core, [turn("t", new_builder(), 0, draft_tokens=text.tokens())])
    first = int(np.flatnonzero(text.observed())[0])
    assert 0 < core.stats().tokens.drafted <= first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kept: replace(kept, observed=kept.observed[1:]), "kept.observed must have shape"),
        (lambda kept: replace(kept, lenience=1.0), "lenience must be None"),
        (lambda kept: replace(kept, topk_logprobs=kept.topk_logprobs - 0.5), "the only one of"),
        (lambda kept: replace(kept, topk_ids=np.roll(kept.topk_ids, 1, 0)), "the only one of"),
    ],
)
def test_impossible_observations_are_refused(
    tiny_qwen3: str, change: Callable[[KeptTokens], KeptTokens], message: str
) -> None:
    core = core_of(load(tiny_qwen3))
    kept = played(core, 0).kept()
    with pytest.raises(RequestError, match=message):
        core.add(turn("v", new_builder(), 1, kept=change(kept)))


@pytest.mark.parametrize("begin", [-1, 3])
def test_a_turn_begins_within_the_prefix(tiny_qwen3: str, begin: int) -> None:
    core = core_of(load(tiny_qwen3))
    two = np.array([1, 2], np.int32)
    with pytest.raises(RequestError, match=f"turn_start={begin} must be from 0 to the 2"):
        core.add(request("a", prefix_tokens=two, turn_start=begin))
