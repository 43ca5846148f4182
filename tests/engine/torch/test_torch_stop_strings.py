"""Stop strings in the torch engine: the response without them, cut where the text has one.

A token depends on the request's seed and place only, so a rule that ends responses must give the
same tokens up to there, whatever is drafted, resumed or verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch_cores
from enumerated_policies import PIECES, STRINGS, rule_of
from stop_strings import end_by_looking
from tiny_models import VOCAB
from torch_cores import joined, kept_of, run, tokens_of

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.errors import RequestError
from asyncrl.engine.protocol import GenerateRequest, TokenChunk
from asyncrl.engine.torch.core import DecodeCore
from asyncrl.engine.torch.model import SlotModel
from asyncrl.rollout.trajectory import Provenance

COUNT, MAX_TOKENS = 60, 24
RULE = rule_of(STRINGS)


def core_of(model: SlotModel, *, drafts: bool = False) -> DecodeCore:
    cache = CacheConfig(max_bytes=1 << 20, min_match=1, min_probability=0.0)
    return torch_cores.core_of(
        model,
        RolloutCache(cache) if drafts else None,
        max_step_tokens=400,
        max_prefill_tokens=900,
        top_k=VOCAB,
    )


def asked(i: int, **fields: Any) -> GenerateRequest:
    settings = {"seed": i, "max_tokens": MAX_TOKENS, "top_k_logprobs": VOCAB}
    return torch_cores.request(f"{i}", **(settings | {"stop_rule": RULE} | fields))


def end_of(tokens: Sequence[int]) -> int | None:
    return end_by_looking(tokens, PIECES, STRINGS)


@pytest.fixture
def model(tiny_qwen3: str) -> SlotModel:
    return torch_cores.load(tiny_qwen3, slots=16)


@pytest.fixture
def whole(model: SlotModel) -> dict[str, list[TokenChunk]]:
    """The responses without stop strings."""
    done = run(core_of(model), [asked(i, stop_rule=None) for i in range(COUNT)])
    ends = [end_of(tokens_of(chunks)) for chunks in done.values()]
    assert COUNT / 3 < sum(end is not None for end in ends) < COUNT
    return done


def check(name: str, chunks: list[TokenChunk], whole: dict[str, list[TokenChunk]]) -> int | None:
    """That a response is the whole one up to its stop string; gives its length if it has one."""
    want = tokens_of(whole[name])
    end = end_of(want)
    assert tokens_of(chunks) == want[:end]
    assert chunks[-1].finish_reason == ("stop" if end else whole[name][-1].finish_reason)
    return end


@pytest.mark.parametrize("drafts", [False, True])
def test_a_response_ends_with_the_token_that_completes_a_string(
    model: SlotModel, whole: dict[str, list[TokenChunk]], drafts: bool
) -> None:
    """Requests with stop strings, with others and with none share the steps."""
    core = core_of(model, drafts=drafts)
    if drafts:  # continuations of ended responses are among the drafts
        run(core, [asked(i, stop_rule=None) for i in range(COUNT)])
    before = core.stats().tokens
    others = [asked(1000 + i, stop_rule=rule_of(("aaa",)), seed=i) for i in range(8)]
    others += [asked(2000 + i, stop_rule=None, seed=i) for i in range(8)]
    done = run(core, [*(asked(i) for i in range(COUNT)), *others])
    for i in range(COUNT):
        check(f"{i}", done[f"{i}"], whole)
    for i in range(8):
        assert tokens_of(done[f"{2000 + i}"]) == tokens_of(whole[f"{i}"])
    after = core.stats().tokens
    assert after.generated - before.generated == sum(len(tokens_of(c)) for c in done.values())
    assert (after.drafted > before.drafted) == drafts
    core.check()


def test_a_resumed_response_remembers_the_beginning_of_a_string(
    model: SlotModel, whole: dict[str, list[TokenChunk]]
) -> None:
    resumed = {}
    for i in range(COUNT):
        tokens = tokens_of(whole[f"{i}"])[: end_of(tokens_of(whole[f"{i}"]))]
        for cut in {len(tokens) - 1, len(tokens) - 2} & set(range(1, MAX_TOKENS)):
            resumed[f"{i}+{cut}"] = np.array(tokens[:cut], np.int32)
    requests = [
        replace(asked(int(name.split("+")[0]), prefix_tokens=prefix), request_id=name)
        for name, prefix in resumed.items()
    ]
    ended = 0
    for name, chunks in run(core_of(model), requests).items():
        first, origin = resumed[name].tolist(), name.split("+")[0]
        want = tokens_of(whole[origin])
        assert first + tokens_of(chunks) == want[: end_of(want)]
        ended += chunks[-1].finish_reason == "stop"
    assert ended > COUNT / 2


def test_kept_tokens_end_where_they_contain_a_string(
    model: SlotModel, whole: dict[str, list[TokenChunk]]
) -> None:
    """All are accepted, as the policy has not changed; what follows the string is not reported."""
    requests = [asked(i, seed=10**6 + i, kept=kept_of(whole[f"{i}"])) for i in range(COUNT)]
    core = core_of(model, drafts=True)
    stopped = 0
    for name, chunks in run(core, requests).items():
        end = check(name, chunks, whole)
        if end is not None:
            stopped += 1
            assert (joined(chunks, "provenance") == Provenance.VERIFIED).all()
    assert stopped > COUNT / 3
    assert core.stats().tokens.generated < COUNT, "verified tokens are not generated ones"


def test_a_prefix_that_has_ended_is_refused(
    model: SlotModel, whole: dict[str, list[TokenChunk]]
) -> None:
    ended = next(t for t in map(tokens_of, whole.values()) if end_of(t) is not None)
    prefix = np.array(ended[: end_of(ended)], np.int32)
    with pytest.raises(RequestError, match="its prefix contains a stop string"):
        core_of(model).add(asked(0, prefix_tokens=prefix))
