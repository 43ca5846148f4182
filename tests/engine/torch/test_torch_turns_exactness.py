"""Two turns with a random tool, on the torch engine: the distribution of all tokens, by chi-square.

One policy draws, a second one judges what is there and goes on, and a third one does so again, each
change in the middle of a turn or between two. The responses, observed tokens included, must follow
the third policy, enumerated with the tool. `false_alarms` says which p-value fails; seeds are
fixed. Mutants must be detected: by such a p-value, or a response that cannot be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from enumerated_policies import core_of, is_detected, p_value, policies, slots_with, truncated
from false_alarms import Claims
from new_weights import swap_weights
from torch_cores import run
from two_turns import (
    Chances,
    Change,
    Part,
    Probabilities,
    Sample,
    World,
    answer_and_chance,
    enumerate_responses,
    likelier,
    summary,
    summed,
    texts_of,
)

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.protocol import GenerateRequest, SamplingParams, TokenChunk
from asyncrl.engine.sampling.verification import Reading
from asyncrl.engine.torch.core import DecodeCore
from asyncrl.rollout.trajectory import Provenance

pytestmark = [pytest.mark.slow, pytest.mark.statistics]

CLAIMS = Claims(__file__)
SAMPLES, WRONG = 1000, 2000
"""Of right generators, and of those that must be detected."""
PROMPT = np.array([4, 0, 7], np.int32)
TOP_K = 3
PLAIN = SamplingParams(1, top_k_logprobs=TOP_K)
CUT = SamplingParams(1, top_k_logprobs=TOP_K, temperature=1.3, top_p=0.75)
"""The policy gives some answers of the tool no probability at all."""
LIMITED = SamplingParams(1, top_k_logprobs=TOP_K, max_turn_tokens=2)


def chances(model: torch.nn.Module, sampling: SamplingParams) -> Chances:
    def of(texts: np.ndarray) -> np.ndarray:
        prompts = np.broadcast_to(PROMPT, (len(texts), len(PROMPT)))
        ids = torch.from_numpy(np.concatenate([prompts, texts], axis=1).astype(np.int64))
        with torch.no_grad():
            logits = model(ids).logits[:, -1].double() / sampling.temperature
        rows: np.ndarray = torch.softmax(logits, -1).numpy()
        if sampling.top_p == 1.0:
            return rows
        return np.stack([truncated(row, 0, sampling.top_p, 0.0) for row in rows])

    return of


@dataclass
class Engine:
    """A core with the first of some policies, and a world that it serves."""

    path: str
    sampling: SamplingParams
    first: torch.nn.Module
    core: DecodeCore = field(init=False)
    world: World = field(init=False)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        cache = RolloutCache(CacheConfig(max_bytes=1 << 22, min_match=1, min_probability=0.0))
        model = slots_with(self.path, self.first, slots=200)
        wide = {"max_step_tokens": 2000, "max_prefill_tokens": 2000}
        self.core = core_of(model, cache, top_k=TOP_K, **wide)
        self.world = World(self.ask, self.sampling, PROMPT)

    def ask(self, requests: list[GenerateRequest]) -> list[list[TokenChunk]]:
        return list(run(self.core, requests).values())

    def install(self, model: torch.nn.Module) -> None:
        swap_weights(self.core, model.state_dict().items(), self.core.policy_version + 1)


@pytest.mark.parametrize(
    "sampling",
    [PLAIN, CUT, LIMITED],
    ids=["plain", "top-p leaves answers out", "limited turns"],
)
def test_turns_follow_the_policy_that_judged_them_last(
    tiny_qwen3: str, sampling: SamplingParams
) -> None:
    old, third = policies(0.3)
    _, second = policies(0.15)
    engine = Engine(tiny_qwen3, sampling, old)
    samples = engine.world.draw(engine.world.begin(SAMPLES), limit=3)
    engine.install(second)
    samples = engine.world.verify(samples, limit=5)
    engine.install(third)
    samples = engine.world.verify(samples)
    drafted = engine.core.stats().tokens
    kept = sum(one.builder.count(Provenance.VERIFIED) for one in samples)
    seen = sum(one.builder.count(Provenance.OBSERVED) for one in samples)
    limit = sampling.max_turn_tokens
    wanted = enumerate_responses(chances(third, sampling), turn_limit=limit)
    p = p_value(texts_of(samples), wanted)
    print(f"verified {kept}, observed {seen}, drafts accepted {drafted.accepted}: p = {p:.3g}")
    assert CLAIMS.fit(p)
    assert drafted.accepted > SAMPLES / 10
    assert kept > SAMPLES / 2
    before = enumerate_responses(chances(second, sampling), turn_limit=limit)
    assert is_detected(texts_of(samples), before)


Drawn = tuple[Engine, list[Sample], list[tuple[Part, Probabilities]]]


@pytest.fixture(scope="module")
def drawn(tiny_qwen3: str) -> Drawn:
    """Whole responses of an old policy, the engine with a new one, and views of what it draws.

    Fewer cells show more.
    """
    old, new = policies(0.3)
    engine = Engine(tiny_qwen3, PLAIN, old)
    samples = engine.world.draw(engine.world.begin(WRONG))
    engine.install(new)
    before, wanted = (enumerate_responses(chances(one, PLAIN)) for one in (old, new))
    parts: list[Part] = [summary, answer_and_chance, likelier(wanted, before)]
    return engine, samples, [(part, summed(wanted, part)) for part in parts]


def is_seen(wrong: list[Sample], views: list[tuple[Part, Probabilities]]) -> bool:
    """By one of the views; the others must pass all."""
    compared = [(list(map(part, texts_of(wrong))), wanted) for part, wanted in views]
    return any(is_detected(*one) for one in compared)


@pytest.mark.parametrize(
    "change",
    [Change(keeps_answer=True), Change(restarts_rejected=True)],
    ids=["answer kept", "restarted if rejected"],
)
def test_wrong_environments_are_detected(drawn: Drawn, change: Change) -> None:
    engine, samples, views = drawn
    assert is_seen(engine.world.verify(samples, change=change), views)


def test_an_engine_that_judges_observations_is_detected(
    drawn: Drawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the policy itself says of them."""
    engine, samples, views = drawn
    monkeypatch.setattr(Reading, "given", lambda reading, _: reading)
    assert is_seen(engine.world.verify(samples), views)


def test_starting_over_whatever_the_tokens_are_is_exact(drawn: Drawn) -> None:
    """The control of "restarted if rejected"; and verification of whole responses."""
    engine, samples, views = drawn
    verified = engine.world.verify(samples)
    fresh = engine.world.draw(engine.world.begin(WRONG))
    for right in (verified, fresh):
        for part, wanted in views:
            assert CLAIMS.fit(p_value(list(map(part, texts_of(right))), wanted))
