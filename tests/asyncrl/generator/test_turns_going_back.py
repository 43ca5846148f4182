"""Environments go back when verification has changed a turn, or their process is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from counting_environments import (
    KEPT,
    NEW,
    SEEN,
    Counting,
    Fickle,
    Plain,
    Recorded,
    Restoring,
    first_turn,
    held_after_two_turns,
    run,
    until,
)
from generator_harness import PROMPT, SAMPLE, GeneratorHarness, settle, verify
from local_environments import LocalPool

from asyncrl.rollout.trajectory import KeptTokens
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.records.step import EnvironmentCounts


@pytest.mark.parametrize(
    ("environment", "steps", "counts"),
    [
        (Counting, ["reset ?", "3 4", "6 9"], EnvironmentCounts(turns=4, replayed=1)),
        (Restoring, ["restore 1", "6 9"], EnvironmentCounts(turns=3, restored=1)),
        (Recorded, ["reset ?", "3 4", "6 9"], EnvironmentCounts(turns=4, replayed=1)),
    ],
)
def test_a_rejection_in_a_turn_has_the_environment_go_back_to_before_it(
    environment: type, steps: list[str], counts: EnvironmentCounts
) -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await held_after_two_turns(harness)
        (held,) = harness.process.samples.held.values()
        answer = int(held.trajectory.tokens[2])
        del env.log[:]
        await harness.send(verify())
        await until(lambda: len(harness.engine.requests) == 3)
        harness.engine.feed(
            "train-5.1-v2",
            [3, 4, answer, 6, 9],
            2,
            origins=[KEPT, KEPT, SEEN, NEW, NEW],
            end="stop",
        )
        await until(lambda: len(harness.finished()) == 2)
        assert env.log == steps
        assert msgspec.structs.replace(harness.generator.environment, seconds=0) == counts
        (held,) = harness.process.samples.held.values()
        assert held.trajectory.tokens.tolist() == [3, 4, answer, 6, 9]  # the recorded one stands
        assert await harness.delivered() == [4.0]

    run(environment, scenario)


def test_a_rejection_in_the_first_turn_gets_a_new_answer() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await held_after_two_turns(harness)
        await harness.send(verify())
        await until(lambda: len(harness.engine.requests) == 3)
        harness.engine.feed("train-5.1-v2", [3, 7], 2, origins=[KEPT, NEW], end="stop")
        await until(lambda: len(harness.engine.requests) == 4)
        assert harness.engine.requests[3].prefix_tokens.tolist() == [3, 7, 51]
        assert env.log[3:] == ["reset ?", "3 7"]
        assert harness.generator.tokens.rejected == 3  # of the four that a policy had drawn

    run(Counting, scenario)


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_who_cannot_go_back_starts_over_whatever_the_tokens_are(turns: int) -> None:
    """Not only after the first answer: that would keep samples by how long their turn is."""

    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        if turns == 0:
            await harness.send(tg.Generate(SAMPLE, PROMPT, 7, priority=1))
            await until(lambda: harness.engine.requests)
            harness.engine.feed("train-5.1", [3], 1)
            await settle()
        elif turns == 1:
            await first_turn(harness)
        else:
            await held_after_two_turns(harness)
        before = len(harness.engine.requests)
        await harness.send(verify())
        await until(lambda: len(harness.engine.requests) == before + 1)
        again = harness.engine.requests[-1]
        assert (again.kept, again.prefix_tokens.tolist(), again.sampling.seed) == (None, [], 9)
        assert env.log.count("reset ?") == 2
        assert harness.generator.environment.started_over == 1
        harness.engine.feed(again.request_id, [9], 2, end="stop")
        await until(lambda: len(harness.finished()) == 1 + (turns == 2))
        assert await harness.delivered() == [1.0]

    run(Plain, scenario)


class Breaking(Plain):
    async def step(self, action: Any) -> Any:
        gate = self.gate
        answer = await super().step(action)
        if gate is not None:
            raise ValueError("too late")
        return answer


async def due_while_answering(harness: GeneratorHarness, env: Any) -> None:
    """Verification is requested while the environment answers the first turn, until `env.gate`."""
    env.gate = asyncio.Event()
    await harness.send(tg.Generate(SAMPLE, PROMPT, 7, priority=1))
    await until(lambda: harness.engine.requests)
    harness.engine.feed("train-5.1", [3], 1, end="stop")
    (generation,) = harness.process.samples.in_generation
    await until(lambda: generation.answering is not None and env.log[-1] == "3")
    await harness.send(verify())


def test_who_starts_over_does_not_wait_for_an_answer_first() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await due_while_answering(harness, env)
        await until(lambda: len(harness.engine.requests) == 2)
        again = harness.engine.requests[-1]
        assert (again.kept, again.prefix_tokens.tolist(), again.sampling.seed) == (None, [], 9)
        assert env.log == ["reset ?", "3", "reset ?"]
        assert harness.generator.environment.started_over == 1
        env.gate.set()
        env.gate = None
        harness.engine.feed(again.request_id, [9], 2, end="stop")
        await until(harness.finished)
        assert await harness.delivered() == [1.0]

    run(Breaking, scenario)


@pytest.mark.parametrize("environment", [Counting, Recorded, Restoring])
def test_who_goes_back_is_verified_after_the_answer(environment: type) -> None:
    """Asked again, an environment whose quick answers are others would answer otherwise."""

    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await due_while_answering(harness, env)
        for _ in range(50):
            await settle()
        assert len(harness.engine.requests) == 1
        env.gate.set()
        await until(lambda: len(harness.engine.requests) == 2)
        kept = harness.engine.requests[1].kept
        assert kept is not None
        assert kept.tokens[0] == 3
        assert env.log == ["reset ?", "3"]

    run(environment, scenario)


@pytest.mark.parametrize("on_error", ["zero", "stop"])
def test_another_answer_to_the_same_actions_is_the_environments_failure(on_error: str) -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await held_after_two_turns(harness)
        await harness.send(verify())
        await until(lambda: len(harness.engine.requests) == 3)
        harness.engine.feed(
            "train-5.1-v2", [3, 4, 61, 6, 9], 2, origins=[KEPT, KEPT, SEEN, NEW, NEW], end="stop"
        )
        if on_error == "zero":
            await until(lambda: len(harness.finished()) == 2)
            assert await harness.delivered() == [0.0]
            rewards = harness.generator.rewards.counts
            assert rewards.failed == {"environment": {"not_deterministic": 1}}
        else:
            await until(lambda: any(isinstance(m, fg.SampleFailed) for m in harness.control.sent))
            (failed,) = [m for m in harness.control.sent if isinstance(m, fg.SampleFailed)]
            assert failed.user_error
            assert "were answered differently" in failed.reason

    run(Fickle, scenario, rewards={"on_error": on_error})


@pytest.mark.parametrize(
    ("environment", "prefix"), [(Counting, [3, 4, 51]), (Recorded, [3, 4, 61]), (Plain, [])]
)
def test_a_lost_session_is_made_again_or_the_sample_starts_over(
    environment: type, prefix: list[int]
) -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await first_turn(harness)
        pool.local.lose()
        seed = env.seed
        del env.log[:]
        harness.engine.feed("train-5.1+1", [5], 1, end="stop")
        await until(lambda: len(harness.engine.requests) == 3)
        again = harness.engine.requests[2]
        assert again.prefix_tokens.tolist()[:3] == prefix
        if prefix:
            assert env.log == ["reset ?", "3 4", "5"]
            assert harness.generator.environment.replayed == 1
        else:
            counts = harness.generator.environment
            assert (counts.started_over, counts.lost) == (1, 1)
            assert again.sampling.seed == 7, "other numbers would prefer short samples"
            assert env.seed == seed

    run(environment, scenario)


@pytest.mark.parametrize("environment", [Counting, Recorded])
def test_a_resumed_sample_is_rebuilt_from_its_tokens_or_begins_again(environment: type) -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        n = 4
        kept = KeptTokens(
            np.array([3, 4, 51, 5], np.int32),
            np.zeros(n, np.float32),
            np.zeros((n, 1), np.int32),
            np.zeros((n, 1), np.float32),
            np.zeros(n, np.uint64),
            np.array([False, False, True, False]),
        )
        harness.process.samples.generate(tg.Generate(SAMPLE, PROMPT, 7), kept)
        await until(lambda: harness.engine.requests)
        first = harness.engine.requests[0]
        if environment is Recorded:  # what it has recorded is gone
            assert first.kept is None
            assert harness.generator.environment.started_over == 1
            return
        assert first.kept is kept
        harness.engine.feed(
            first.request_id, [3, 4, 51, 5, 9], 1, origins=[KEPT, KEPT, SEEN, KEPT, NEW], end="stop"
        )
        await until(harness.finished)
        assert env.log == ["reset ?", "3 4", "5 9"]
        assert await harness.delivered() == [4.0]

    run(environment, scenario)


def test_a_suspect_runs_alone_until_its_turn_is_answered() -> None:
    """Else the one that is at fault ends the process of the others again and again."""

    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await first_turn(harness)
        env.gate = asyncio.Event()
        harness.engine.feed("train-5.1+1", [5], 1, end="stop")
        await until(lambda: env.log[-1] == "5")
        del pool.local.alone[:]
        pool.local.lose(suspects=2)
        await until(lambda: env.log[-2:] == ["reset ?", "3 4"])
        env.gate.set()
        await until(lambda: len(harness.engine.requests) == 3)
        assert pool.local.alone == [True, True, True]  # reset, the replayed turn, the new one
        harness.engine.feed("train-5.1+2", [6], 1, end="stop")
        await until(lambda: len(harness.engine.requests) == 4)
        assert pool.local.alone[3:] == [False]

    run(Counting, scenario, max_tokens=20)
