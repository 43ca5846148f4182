"""KV that waits for a session's next turn: what is fed again, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from enumerated_policies import policies
from new_weights import swap_weights
from tiny_models import STOP, make_qwen3
from torch_cores import PROMPT, check_against_hf, core_of, load, request, tokens_of

from asyncrl.engine.protocol import GenerateRequest, TokenChunk
from asyncrl.engine.torch.admission import RetainedSlots
from asyncrl.engine.torch.core import DecodeCore
from asyncrl.engine.torch.model import SlotModel
from asyncrl.engine.torch.slots import StepInputs
from asyncrl.rollout.trajectory import IntArray

ANSWER = np.array([2, STOP, 5, 7], np.int32)
STOPS = (STOP, 3, 5, 6)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of new contexts that each forward pass is given."""
    forward, counts = SlotModel.forward, list[int]()

    def counted(model: SlotModel, feed: StepInputs) -> Any:
        counts.append(len(feed.new_tokens))
        return forward(model, feed)

    monkeypatch.setattr(SlotModel, "forward", counted)
    return counts


def turn(session: str, prefix: IntArray, seed: int, **changes: Any) -> GenerateRequest:
    fields = {"max_tokens": 45, "stop_tokens": STOPS, "seed": seed, "session": session} | changes
    name = f"{session}.{len(prefix)}"
    return request(name, prefix_tokens=prefix, turn_start=len(prefix), **fields)


def served(core: DecodeCore, asked: GenerateRequest) -> list[TokenChunk]:
    core.add(asked)
    chunks: list[TokenChunk] = []
    while core.has_work:
        chunks += core.step()
        core.check()
    return chunks


@pytest.mark.parametrize("how", ["fused", "plain", "batch-invariant"])
def test_the_next_turn_feeds_only_what_is_new(tiny_qwen3: str, how: str, fed: list[int]) -> None:
    model = load(tiny_qwen3, fused=how == "fused", batch_invariant=how == "batch-invariant")
    core, alone = core_of(model), core_of(load(tiny_qwen3))
    prefix = np.empty(0, np.int32)
    for number in range(4):
        asked = turn("a", prefix, number)
        fed.clear()
        chunks = served(core, asked)
        # The last token of a turn was drawn and not fed.
        assert fed[0] == (len(PROMPT) if number == 0 else 1 + len(ANSWER))
        check_against_hf(make_qwen3(), asked, chunks)
        assert tokens_of(chunks) == tokens_of(served(alone, replace(asked, session="")))
        prefix = np.concatenate([prefix, tokens_of(chunks), ANSWER]).astype(np.int32)


def sessions(
    core: DecodeCore, count: int, turns: int, named: bool
) -> Iterator[tuple[str, list[int]]]:
    """Turns of many sessions; answers come in another order than the turns have ended."""
    rng = np.random.default_rng(3)
    prefixes = [np.empty(0, np.int32)] * count
    waiting, played = list(range(count)), [0] * count
    while waiting or core.has_work:
        chosen = rng.permutation(len(waiting))[: int(rng.integers(0, 4))]
        for i in sorted(chosen.tolist(), reverse=True):
            one = waiting.pop(i)
            asked = turn(f"s{one}", prefixes[one], 100 * one + played[one], max_tokens=60)
            core.add(asked if named else replace(asked, session=""))
        for chunk in core.step() if core.has_work else ():
            one = int(chunk.request_id[1:].split(".")[0])
            prefixes[one] = np.concatenate([prefixes[one], chunk.tokens])
            if chunk.finish_reason is None:
                continue
            played[one] += 1
            yield chunk.request_id, prefixes[one].tolist()
            if played[one] < turns and len(prefixes[one]) < 50:
                prefixes[one] = np.concatenate([prefixes[one], ANSWER])
                waiting.append(one)
        core.check()


@pytest.mark.parametrize("slots", [3, 5, 12])
def test_many_sessions_in_any_order_generate_the_same(
    tiny_qwen3: str, slots: int, fed: list[int]
) -> None:
    """Parked KV is moved, taken along and evicted as rows come and go; turns share steps."""
    tokens = []
    for named in (True, False):
        fed.clear()
        core = core_of(load(tiny_qwen3, slots=slots), max_prefill_tokens=200)
        tokens.append((dict(sessions(core, 8, 4, named)), sum(fed)))
    (with_kv, fewer), (without, all_of_it) = tokens
    assert with_kv == without
    assert len(with_kv) > 20
    assert fewer < all_of_it * (0.5 if slots == 12 else 0.95)


def test_what_waits_longest_gives_its_slot(tiny_qwen3: str, fed: list[int]) -> None:
    core = core_of(load(tiny_qwen3, slots=2))
    first = {name: tokens_of(served(core, turn(name, np.empty(0, np.int32), 5))) for name in "ab"}
    served(core, turn("", np.empty(0, np.int32), 1))  # needs a slot, and parks nothing
    for name, is_known in (("b", True), ("a", False)):
        prefix = np.concatenate([first[name], ANSWER]).astype(np.int32)
        fed.clear()
        served(core, turn(name, prefix, 6))
        assert (fed[0] == 1 + len(ANSWER)) == is_known


@pytest.mark.parametrize("forgets", [True, False])
def test_kv_of_other_weights_is_not_taken(
    tiny_qwen3: str, forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lot that is not told of an installation fails the same checks."""
    if not forgets:
        monkeypatch.setattr(RetainedSlots, "clear", lambda _: None)
    core, new = core_of(load(tiny_qwen3)), policies(0.5)[1]
    first = tokens_of(served(core, turn("a", np.empty(0, np.int32), 5)))
    swap_weights(core, new.state_dict().items(), 1)
    asked = turn("a", np.concatenate([first, ANSWER]).astype(np.int32), 6)
    chunks = served(core, asked)
    if forgets:
        check_against_hf(new, asked, chunks)
    else:
        with pytest.raises(AssertionError):
            check_against_hf(new, asked, chunks)


def test_a_turn_that_ran_across_an_installation_parks_nothing(tiny_qwen3: str) -> None:
    core, new = core_of(load(tiny_qwen3)), policies(0.5)[1]
    core.add(turn("a", np.empty(0, np.int32), 5, stop_tokens=(), max_tokens=20))
    first = core.step()
    swap_weights(core, new.state_dict().items(), 1)
    while core.has_work:
        first += core.step()
    asked = turn("a", np.concatenate([tokens_of(first), ANSWER]).astype(np.int32), 6)
    check_against_hf(new, asked, served(core, asked))


def test_another_text_of_a_session_takes_nothing(tiny_qwen3: str, fed: list[int]) -> None:
    """Its environment went back, and other tokens were drawn."""
    core = core_of(load(tiny_qwen3))
    served(core, turn("a", np.empty(0, np.int32), 5))
    other = np.array([8, 8, STOP, 2], np.int32)
    fed.clear()
    asked = turn("a", other, 6)
    check_against_hf(make_qwen3(), asked, served(core, asked))
    assert fed[0] == len(PROMPT) + len(other)


def test_a_session_that_has_ended_leaves_its_slot_to_others(
    tiny_qwen3: str, fed: list[int]
) -> None:
    """Otherwise `b`, which has waited longer than nobody's KV, would be dropped."""
    core = core_of(load(tiny_qwen3, slots=3))
    first = {name: tokens_of(served(core, turn(name, np.empty(0, np.int32), 5))) for name in "ba"}
    core.end_session("a")
    core.end_session("a")
    core.end_session("never seen")
    core.check()
    for name in "cd":  # two rows at once leave one slot
        core.add(turn("", np.empty(0, np.int32), 1) if name == "c" else turn("d", ANSWER, 1))
    while core.has_work:
        core.step()
        core.check()
    for name, is_known in (("b", True), ("a", False)):
        prefix = np.concatenate([first[name], ANSWER]).astype(np.int32)
        fed.clear()
        served(core, turn(name, prefix, 6))
        assert (fed[0] == 1 + len(ANSWER)) == is_known
