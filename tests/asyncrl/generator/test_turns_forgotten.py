"""What followed tokens that verification has rejected counts no more: rewards, failures, times."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from counting_environments import (
    KEPT,
    NEW,
    SEEN,
    Counting,
    Plain,
    Restoring,
    held_after_two_turns,
    run,
    until,
)
from generator_harness import PROMPT, SAMPLE, GeneratorHarness, verify
from local_environments import LocalPool

from asyncrl.environments.protocol import Action
from asyncrl.rollout.trajectory import KeptTokens
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg

ZERO = {"on_error": "zero"}


class Brittle(Counting):
    """As Counting; a turn with an 8 makes it raise."""

    async def step(self, action: Action) -> Any:
        answer = await super().step(action)
        if 8 in action.tokens:
            raise ValueError("8")
        return answer


class PlainBrittle(Brittle, Plain):
    replay = None


class RestoringBrittle(Brittle, Restoring):
    replay = None


async def verified(
    harness: GeneratorHarness, tokens: list[int], origins: list[Any], end: str
) -> None:
    """Have the held SAMPLE verified with this outcome, and wait until it is held again."""
    await harness.send(verify())
    await until(lambda: len(harness.engine.requests) == 3)
    harness.engine.feed("train-5.1-v2", tokens, 2, origins=origins, end=end)
    await until(lambda: len(harness.finished()) == 2)


async def failed_in_its_second_turn(harness: GeneratorHarness) -> None:
    await harness.send(tg.Generate(SAMPLE, PROMPT, 7, priority=1))
    await until(lambda: harness.engine.requests)
    harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
    await until(lambda: len(harness.engine.requests) == 2)
    harness.engine.feed("train-5.1+1", [5, 8], 1, end="stop")
    await until(harness.finished)


@pytest.mark.parametrize("environment", [Counting, Restoring])
def test_a_turn_that_was_discarded_is_not_rewarded(environment: type) -> None:
    """Also where the turn in its place is cut off, so that no environment is asked again."""

    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await held_after_two_turns(harness)
        cut = [3, 4, 51, 5, 7, 7, 7, 7]
        await verified(harness, cut, [KEPT, KEPT, SEEN, KEPT, NEW, NEW, NEW, NEW], "length")
        assert await harness.delivered() == [2.0]  # of the first turn alone

    run(environment, scenario)


@pytest.mark.parametrize("environment", [Counting, Restoring])
def test_a_turn_that_comes_again_after_one_that_was_cut_off_is_answered_again(
    environment: type,
) -> None:
    """Its first answer helped to decide that it was discarded."""

    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await held_after_two_turns(harness)
        cut = [3, 4, 51, 5, 7, 7, 7, 7]
        await verified(harness, cut, [KEPT, KEPT, SEEN, KEPT, NEW, NEW, NEW, NEW], "length")
        del env.log[:]
        await harness.send(verify(seed=11, min_version=3))
        await until(lambda: len(harness.engine.requests) == 4)
        origins = [KEPT, KEPT, SEEN, KEPT, NEW]
        harness.engine.feed("train-5.1-v3", [3, 4, 51, 5, 9], 3, origins=origins, end="stop")
        await until(lambda: len(harness.finished()) == 3)
        assert env.log == (["reset ?", "3 4"] if environment is Counting else ["restore 1"]) + [
            "5 9"
        ]
        assert await harness.delivered() == [4.0]

    run(environment, scenario)


@pytest.mark.parametrize(
    ("tokens", "end", "reward"),
    [
        ([3, 4, 51, 5, 8], "stop", 0.0),  # accepted: it has failed after these turns
        ([3, 4, 51, 5, 9], "stop", 4.0),
        ([3, 4, 51, 5, 7, 7, 7, 7], "length", 2.0),
    ],
)
def test_a_failure_belongs_to_the_turns_that_it_followed(
    tokens: list[int], end: str, reward: float
) -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await failed_in_its_second_turn(harness)
        del env.log[:]
        origins = [KEPT, KEPT, SEEN, KEPT, *(len(tokens) - 4) * [NEW]]
        await verified(harness, tokens, origins, end)
        assert env.log == (["reset ?", "3 4", "5 9"] if reward == 4 else [])
        assert await harness.delivered() == [reward]
        failed = harness.generator.rewards.counts.failed
        assert failed == {"environment": {"raised": 1}}

    run(Brittle, scenario, rewards=ZERO)


class Unreached(Brittle):
    """As Brittle; the 8 is sent to a service that is down."""

    async def step(self, action: Action) -> Any:
        try:
            return await super().step(action)
        except ValueError:
            raise RuntimeError("the service") from ConnectionRefusedError(111, "refused")


class Unmade(Counting):
    async def reset(self, row: dict[str, Any], seed: int) -> str | None:
        raise ValueError("no such room")


@pytest.mark.parametrize(
    ("environment", "verdict"),
    [(Counting, "scored"), (Brittle, "failed"), (Unreached, "unscored"), (Unmade, "unscored")],
)
def test_a_held_out_sample_is_left_out_only_if_its_failure_says_nothing_about_its_turns(
    environment: type, verdict: str
) -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await harness.send(tg.Evaluate(round=3, index=4, prompt=PROMPT, seed=7))
        await until(lambda: harness.engine.requests)
        harness.engine.feed("eval-3.4", [5, 8, 9], 1, end="stop")
        await until(lambda: isinstance(harness.control.sent[-1], fg.EvaluationSample))
        said = harness.control.sent[-1]
        assert (said.verdict, said.reward) == (verdict, 3.0 if verdict == "scored" else 0.0)

    run(environment, scenario, rewards=ZERO)


def test_after_a_failure_who_cannot_go_back_starts_over_whatever_the_tokens_are() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await failed_in_its_second_turn(harness)
        await harness.send(verify())
        await until(lambda: len(harness.engine.requests) == 3)
        again = harness.engine.requests[2]
        assert (again.kept, again.prefix_tokens.tolist()) == (None, [])
        harness.engine.feed(again.request_id, [9], 2, end="stop")
        await until(lambda: len(harness.finished()) == 2)
        assert await harness.delivered() == [1.0]

    run(PlainBrittle, scenario, rewards=ZERO)


@pytest.mark.parametrize("is_lost", [False, True])
def test_after_a_failure_who_restores_is_verified_and_goes_back_if_the_turn_changes(
    is_lost: bool,
) -> None:
    """To start over always would take failures away: other texts are kept if they are accepted."""

    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await failed_in_its_second_turn(harness)
        del env.log[:]
        if is_lost:
            pool.local.lose()
        await harness.send(verify())
        await until(lambda: len(harness.engine.requests) == 3)
        assert harness.engine.requests[2].kept is not None
        origins = [KEPT, KEPT, SEEN, KEPT, NEW]
        harness.engine.feed("train-5.1-v2", [3, 4, 51, 5, 9], 2, origins=origins, end="stop")
        if is_lost:  # with its process
            await until(lambda: len(harness.engine.requests) == 4)
            assert harness.engine.requests[3].prefix_tokens.tolist() == []
            counts = harness.generator.environment
            assert (counts.started_over, counts.lost) == (1, 1)
            return
        await until(lambda: len(harness.finished()) == 2)
        assert env.log == ["restore 1", "5 9"]
        assert await harness.delivered() == [4.0]
        counts = harness.generator.environment
        assert (counts.started_over, counts.restored, counts.lost) == (0, 1, 0)
        await until(lambda: not pool.local.sessions)

    run(RestoringBrittle, scenario, rewards=ZERO)


def test_a_turn_that_a_deadline_left_unanswered_is_rewarded_once_it_is_answered() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        env.gate = asyncio.Event()
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7, priority=1, deadline_seconds=1000.0))
        await until(lambda: harness.engine.requests)
        harness.engine.feed("train-5.1", [3, 9], 1, end="stop")
        await until(lambda: env.log[-1] == "3 9")
        (generation,) = harness.process.samples.in_generation
        assert generation.first_token_at is not None
        generation.first_token_at -= 2000.0
        harness.process.end_overdue()
        await until(harness.finished)
        assert harness.finished()[0].finish_reason == "deadline"
        env.gate.set()
        await harness.send(verify())
        await until(lambda: len(harness.engine.requests) == 2)
        harness.engine.feed("train-5.1-v2", [3, 9], 2, origins=[KEPT, KEPT], end="stop")
        await until(lambda: len(harness.finished()) == 2)
        assert harness.finished()[1].finish_reason == "stop"
        assert await harness.delivered() == [2.0]

    run(Counting, scenario)


def test_a_sample_that_starts_over_has_its_whole_time_again() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7, deadline_seconds=1000.0))
        await until(lambda: harness.engine.requests)
        harness.engine.feed("train-5.1", [3], 1, end="stop")
        await until(lambda: len(harness.engine.requests) == 2)
        (generation,) = harness.process.samples.in_generation
        assert generation.first_token_at is not None
        pool.local.lose()
        harness.engine.feed("train-5.1+1", [4], 1, end="stop")
        await until(lambda: len(harness.engine.requests) == 3)
        assert (generation.first_token_at, len(generation.builder)) == (None, 0)

    run(Plain, scenario)


def test_a_process_that_ends_in_reset_again_and_again_is_the_samples_failure() -> None:
    class Dying(Counting):
        async def reset(self, row: dict[str, Any], seed: int) -> str | None:
            first = await super().reset(row, seed)
            await asyncio.Event().wait()
            return first

    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        for attempt in range(1, 4):
            await until(lambda count=attempt: env.log.count("reset ?") == count)
            pool.local.lose()
        await until(lambda: harness.engine.requests)
        harness.engine.feed("train-5.1", [3], 1, end="stop")
        await until(harness.finished)
        assert await harness.delivered() == [0.0]
        assert harness.generator.rewards.counts.failed == {"environment": {"died": 1}}

    run(Dying, scenario, rewards=ZERO)


def test_an_environment_that_waits_for_a_verification_ends_with_its_sample() -> None:
    """Also if it is dropped before the verification has begun."""

    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await held_after_two_turns(harness)
        assert not pool.local.closed
        samples = harness.process.samples
        await samples.verify(SAMPLE, 9, 2)
        samples.discard([SAMPLE])
        await until(lambda: pool.local.closed)
        assert not pool.local.sessions

    run(Restoring, scenario)


def test_an_evaluation_that_is_given_up_ends_its_environments() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        fixed = tg.FixedVersion(1, ahead=True, hold_seconds=1000.0, verify_seed=99)
        await harness.send(tg.Evaluate(round=3, index=4, prompt=PROMPT, seed=7, fixed=fixed))
        await until(lambda: harness.engine.requests)
        harness.engine.feed("eval-3.4", [3, 9], 0, end="stop")
        await until(lambda: env.log == ["reset ?", "3 9"])
        await until(lambda: not harness.process._evaluation.in_generation)
        assert pool.local.sessions, "it may have to go back"
        await harness.send(tg.AbandonEvaluation(3))
        await until(lambda: not pool.local.sessions)

    run(Restoring, scenario)


def test_a_resumed_sample_that_is_cut_off_has_the_rewards_of_its_turns() -> None:
    """Nothing of them is in its file: the environment is given the turns again."""

    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        tokens = np.array([3, 4, 51, 5, 5, 5, 5, 5], np.int32)
        n = len(tokens)
        kept = KeptTokens(
            tokens,
            np.zeros(n, np.float32),
            np.zeros((n, 1), np.int32),
            np.zeros((n, 1), np.float32),
            np.zeros(n, np.uint64),
            tokens == 51,
        )
        harness.process.samples.generate(tg.Generate(SAMPLE, PROMPT, 7), kept)
        await until(lambda: harness.engine.requests)
        origins = [KEPT, KEPT, SEEN, *5 * [KEPT]]
        name = harness.engine.requests[0].request_id
        harness.engine.feed(name, tokens.tolist(), 1, origins=origins, end="length")
        await until(harness.finished)
        assert harness.finished()[0].finish_reason == "length"
        assert env.log == ["reset ?", "3 4"]
        assert await harness.delivered() == [2.0]

    run(Counting, scenario)
