"""Processes that end: the sample at fault is found, and the others do not fail because of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting_environments import Counting, Plain, first_turn, run, until
from generator_harness import GeneratorHarness
from local_environments import LocalPool, NumberRenderer, in_words

from asyncrl.environments.config import EnvironmentConfig
from asyncrl.environments.translation import Translation
from asyncrl.environments.workers.lane import ProcessEnd, SessionLost
from asyncrl.environments.workers.pool import EnvironmentPool
from asyncrl.generator.sample_state import SampleGeneration
from asyncrl.generator.turns import conversation as suspect_tracking
from asyncrl.generator.turns.conversation import MAX_UNEXPLAINED, ProcessEnds
from asyncrl.generator.turns.environment_turns import Episodes, StartOver
from asyncrl.rewards.config import RewardConfig
from asyncrl.rollout.trajectory import Provenance, SampleId
from asyncrl.wire.messages.data import encode_tokens
from asyncrl.wire.messages.to_generator import PromptPayload


def lost(end: ProcessEnd, suspects: int = 0) -> SessionLost:
    return SessionLost(end.how, end, suspects=suspects)


def test_a_suspect_is_alone_until_the_turn_in_question_is_answered() -> None:
    ends = ProcessEnds()
    ends.note(lost(ProcessEnd("died"), suspects=3), given=2)
    for turns in (0, 1):  # the session that was made again
        ends.answered(turns)
        assert ends.alone
    ends.note(lost(ProcessEnd("died")), given=1)  # because of another sample
    assert ends.alone
    ends.answered(2)
    assert not ends.alone


def test_what_another_sample_has_caused_does_not_count() -> None:
    culprit, innocent = ProcessEnds(), ProcessEnds()
    for _ in range(2 * MAX_UNEXPLAINED):
        end = ProcessEnd("died")
        culprit.note(lost(end, suspects=2), given=1)
        innocent.note(lost(end, suspects=2), given=1)
        assert innocent.unexplained == 1
        culprit.note(lost(ProcessEnd("died", explained=True), suspects=1), given=1)
        assert innocent.unexplained == 0
    assert (innocent.deaths, culprit.deaths) == (0, 2 * MAX_UNEXPLAINED)


def test_a_suspect_that_starts_over_stays_alone_up_to_its_turn() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await first_turn(harness)
        env.gate = asyncio.Event()
        harness.engine.feed("train-5.1+1", [5], 1, end="stop")
        await until(lambda: env.log[-1] == "5")
        del pool.local.alone[:]
        pool.local.lose(suspects=2)
        await until(lambda: len(harness.engine.requests) == 3)
        env.gate.set()
        for count, tokens in enumerate(([3, 4], [5], [6]), start=3):
            name = harness.engine.requests[-1].request_id
            harness.engine.feed(name, tokens, 1, end="stop")
            await until(lambda count=count: len(harness.engine.requests) == count + 1)
        assert env.log[-4:] == ["reset ?", "3 4", "5", "6"]
        assert pool.local.alone == [True, True, True, False]

    run(Plain, scenario, max_tokens=20)


def test_ends_that_nobody_is_at_fault_for_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment may end its process while no call of it is in progress."""
    monkeypatch.setattr(suspect_tracking, "MAX_UNEXPLAINED", 3)

    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await first_turn(harness)
        for turn in range(4):
            assert not harness.finished()
            pool.local.lose(suspects=0)
            asked = len(harness.engine.requests)
            name = harness.engine.requests[-1].request_id
            harness.engine.feed(name, [5 + turn], 1, end="stop")
            await until(
                lambda asked=asked: len(harness.engine.requests) > asked or harness.finished()
            )
        assert harness.finished()
        assert harness.generator.rewards.counts.failed == {"environment": {"died": 1}}

    run(Counting, scenario, max_tokens=20, rewards={"on_error": "zero"})


KILLER = """
import os, signal

class Env:
    def reset(self, row, seed):
        self.kills, self.turns = row["kills"], 0
        return "1 2"

    def step(self, action):
        self.turns += 1
        if self.kills and self.turns == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return ("3", self.turns == 4, 1.0)
"""


def test_one_sample_that_ends_processes_costs_no_other(tmp_path: Path) -> None:
    """Environments that cannot go back, in a real worker: all start over, and one fails."""
    (tmp_path / "killers.py").write_text(KILLER)

    async def scenario() -> None:
        config = EnvironmentConfig(name=f"{tmp_path}/killers.py:Env")
        pool = EnvironmentPool(config, RewardConfig(on_error="zero"))
        await pool.start()
        try:
            translation = Translation(NumberRenderer(), in_words, 100, max_observation_tokens=4)
            episodes = Episodes(pool, translation, max_tokens=50, max_model_len=64)
            failed = await asyncio.gather(
                *(_fails(episodes, number, kills=number == 2) for number in range(6))
            )
        finally:
            await pool.close()
        assert failed == [False, False, True, False, False, False]
        assert episodes.counts.replaced_workers <= 4, "found together, then alone three times"

    asyncio.run(scenario())


async def _fails(episodes: Episodes, number: int, *, kills: bool) -> bool:
    """Play one sample, whose policy always says the same."""
    prompt = PromptPayload(f"p{number}", encode_tokens(np.array([1], np.int32)), {"kills": kills})
    sample = SampleGeneration(SampleId(0, number), prompt, number)
    sample.episode = episodes.new(sample)
    async with asyncio.timeout(60):
        while True:
            if not sample.episode.opened:
                await episodes.begin(sample)
            _say(sample)
            try:
                end = await episodes.answer(sample)
            except StartOver:
                sample.start_over()
                continue
            if end is not None:
                return sample.episode.failed


def _say(sample: SampleGeneration) -> None:
    sample.builder.append(
        tokens=np.array([7], np.int32),
        logprobs=np.zeros(1, np.float32),
        topk_ids=np.array([[7]], np.int32),
        topk_logprobs=np.zeros((1, 1), np.float32),
        noise_seeds=np.zeros(1, np.uint64),
        provenance=np.full(1, Provenance.SAMPLED, np.uint8),
        policy_version=0,
    )
