"""Samples of several turns: a fake engine, environments behind the real episodes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from counting_environments import (
    KEPT,
    NEW,
    SEEN,
    Counting,
    Restoring,
    first_turn,
    held_after_two_turns,
    run,
    until,
)
from generator_harness import PROMPT, SAMPLE, GeneratorHarness, verify
from local_environments import LocalPool

from asyncrl.environments.protocol import Action
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.records.step import EnvironmentCounts


def test_turns_and_answers_alternate_in_one_growing_sequence() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await first_turn(harness)
        first, second = harness.engine.requests
        assert (first.turn_start, first.prefix_tokens.tolist()) == (0, [])
        assert first.session == second.session == f"train-{SAMPLE}", "its KV is kept between turns"
        assert second.prefix_tokens.tolist() == [3, 4, 51]
        assert (second.turn_start, second.kept, second.sampling.seed) == (3, None, 7)
        harness.engine.feed(second.request_id, [5, 9], 1, end="stop")
        await until(harness.finished)
        assert env.log == ["reset ?", "3 4", "5 9"]
        assert pool.local.closed
        (held,) = harness.process.samples.held.values()
        assert held.trajectory.tokens.tolist() == [3, 4, 51, 5, 9]
        assert held.trajectory.provenance.tolist() == [NEW, NEW, SEEN, NEW, NEW]
        assert held.trajectory.finish_reason == "stop"
        assert await harness.delivered() == [4.0]
        assert harness.data.sent[0].terms == (4.0,)
        assert msgspec.structs.replace(
            harness.generator.environment, seconds=0
        ) == EnvironmentCounts(turns=2)

    run(Counting, scenario)


def test_an_environment_is_told_how_much_the_policy_has_read() -> None:
    read: list[int] = []

    class Told(Counting):
        async def step(self, action: Action) -> Any:
            read.append(action.context_length)
            return await super().step(action)

    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await held_after_two_turns(harness)
        assert read == [2, 2 + 2 + 1]  # prompt, turn, answer
        await harness.send(verify())
        await until(lambda: len(harness.engine.requests) == 3)
        harness.engine.feed(
            "train-5.1-v2", [3, 4, 51, 6, 9], 2, origins=[KEPT, KEPT, SEEN, NEW, NEW], end="stop"
        )
        await until(lambda: len(harness.finished()) == 2)
        assert read[2:] == read[:2]  # replayed

    run(Told, scenario)


def test_functions_get_the_text_of_the_turns_and_the_sum_is_weighted() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        harness.rewards.has_functions = True
        await held_after_two_turns(harness)
        assert await harness.delivered() == [3.0 + 0.5 * 4.0]  # the fake counts words
        assert harness.data.sent[0].terms == (3.0, 0.5, 4.0)
        assert harness.rewards.asked == ["3 45 9"]
        assert harness.rewards.rows[0]["turns"] == [
            {"role": "assistant", "content": "3 4", "context": 0},
            {"role": "environment", "content": "51", "context": 0},
            {"role": "assistant", "content": "5 9", "context": 0},
        ]
        [said] = harness.rewards.rows[0]["conversations"]
        assert [(one["role"], one["content"]) for one in said] == [
            ("user", "?"), ("assistant", "3 4"), ("user", "51"), ("assistant", "5 9"),
        ]  # fmt: skip

    run(Counting, scenario, reward_weight=0.5)


def test_what_reset_says_is_the_prompt() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        prompt = tg.PromptPayload("p", PROMPT.tokens, {"prompt": "?", "first": "7 8"})
        await harness.send(tg.Generate(SAMPLE, prompt, 7))
        await until(lambda: harness.engine.requests)
        assert harness.engine.requests[0].prompt_tokens.tolist() == [7, 8]

    run(Counting, scenario)


def test_a_sample_has_no_slot_while_its_environment_answers() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        env.gate = asyncio.Event()
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7, priority=1))
        await until(lambda: harness.engine.requests)
        assert harness.process.samples.in_environments == 0
        harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await until(lambda: env.log[-1] == "3 4")
        assert harness.process.samples.in_environments == 1
        assert not harness.engine.serving
        await harness.send(verify())  # requested meanwhile: it begins with the answer
        assert len(harness.engine.requests) == 1
        env.gate.set()
        await until(lambda: len(harness.engine.requests) == 2)
        kept = harness.engine.requests[1].kept
        assert kept is not None
        assert kept.tokens.tolist() == [3, 4, 51]
        assert kept.observed.tolist() == [False, False, True]
        harness.engine.feed(
            "train-5.1-v2", [3, 4, 51, 9], 2, origins=[KEPT, KEPT, SEEN, NEW], end="stop"
        )
        await until(harness.finished)
        assert env.log == ["reset ?", "3 4", "9"]  # the session was where it had to be
        assert (harness.generator.tokens.verified, harness.generator.tokens.rejected) == (2, 0)

    run(Counting, scenario)


def test_an_unchanged_sample_asks_its_environment_nothing() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await held_after_two_turns(harness)
        await harness.send(verify())
        await until(lambda: len(harness.engine.requests) == 3)
        kept = harness.engine.requests[2].kept
        assert kept is not None
        assert kept.tokens.tolist() == [3, 4, 51, 5, 9]
        harness.engine.feed(
            "train-5.1-v2", [3, 4, 51, 5, 9], 2, origins=[KEPT, KEPT, SEEN, KEPT, KEPT], end="stop"
        )
        await until(lambda: len(harness.finished()) == 2)
        assert env.log == ["reset ?", "3 4", "5 9"]
        assert await harness.delivered() == [4.0]

    run(Counting, scenario)


def test_an_environment_that_ends_its_process_again_and_again_fails() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        env.gate = asyncio.Event()
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        await until(lambda: harness.engine.requests)
        harness.engine.feed("train-5.1", [3], 1, end="stop")
        for attempt in range(1, 4):
            await until(lambda count=attempt: env.log.count("3") == count)
            pool.local.lose()
        await until(harness.finished)
        assert await harness.delivered() == [0.0]
        assert harness.generator.rewards.counts.failed == {"environment": {"died": 1}}

    run(Counting, scenario, rewards={"on_error": "zero"})


def test_a_reset_that_fails_leaves_one_turn_on_the_rows_prompt() -> None:
    class Broken(Counting):
        async def reset(self, row: dict[str, Any], seed: int) -> str | None:
            raise ValueError("no")

    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        await until(lambda: harness.engine.requests)
        assert harness.engine.requests[0].prompt_tokens.tolist() == [1, 2]
        harness.engine.feed("train-5.1", [3], 1, end="stop")
        await until(harness.finished)
        assert await harness.delivered() == [0.0]

    run(Broken, scenario, rewards={"on_error": "zero"})


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [({"max_turns": 1}, [3, 4]), ({"max_tokens": 3}, [3, 4]), ({"max_turns": 2}, [3, 4, 51, 5])],
)
def test_limits_end_a_sample_without_the_last_observation(
    settings: dict[str, int], tokens: list[int]
) -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        await until(lambda: harness.engine.requests)
        harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
        if len(tokens) > 2:
            await until(lambda: len(harness.engine.requests) == 2)
            harness.engine.feed("train-5.1+1", [5], 1, end="stop")
        await until(harness.finished)
        assert harness.finished()[0].finish_reason == "length"
        (held,) = harness.process.samples.held.values()
        assert held.trajectory.tokens.tolist() == tokens
        assert await harness.delivered() == [float(len(tokens) - tokens.count(51))]

    run(Counting, scenario, **settings)


@pytest.mark.parametrize("settings", [{}, {"name": "agent:mine.py:agent"}], ids=["other", "agent"])
def test_an_observation_that_is_too_long_is_a_failure(settings: dict[str, str]) -> None:
    """And no reason to end a run whose agent a policy has led there."""

    class Talking(Counting):
        async def step(self, action: Action) -> Any:
            return ("1 2 3 4 5", False)

    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        await until(lambda: harness.engine.requests)
        harness.engine.feed("train-5.1", [3], 1, end="stop")
        await until(harness.finished)
        assert await harness.delivered() == [0.0]
        assert harness.generator.rewards.counts.failed == {"environment": {"too_long": 1}}

    run(Talking, scenario, rewards={"on_error": "stop" if settings else "zero"}, **settings)


def test_a_sample_whose_time_is_up_while_it_waits_ends_there() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        env.gate = asyncio.Event()
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7, deadline_seconds=5.0))
        await until(lambda: harness.engine.requests)
        harness.engine.feed("train-5.1", [3], 1, end="stop")
        await until(lambda: env.log[-1] == "3")
        (generation,) = harness.process.samples.in_generation
        assert generation.first_token_at is not None
        generation.first_token_at -= 6.0
        harness.process.end_overdue()
        await until(harness.finished)
        assert harness.finished()[0].finish_reason == "deadline"
        assert pool.local.closed
        assert await harness.delivered() == [0.0]

    run(Counting, scenario)


def test_a_discarded_sample_ends_its_session() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await first_turn(harness)
        assert pool.local.sessions
        await harness.send(tg.Discard((SAMPLE,)))
        await until(lambda: not pool.local.sessions)

    run(Counting, scenario)


def test_a_held_sample_keeps_the_session_that_only_it_can_restore() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await held_after_two_turns(harness)
        assert pool.local.sessions
        await harness.delivered()
        await until(lambda: not pool.local.sessions)

    run(Restoring, scenario)


def test_the_seed_of_the_environment_stays_and_is_not_the_samplings() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await held_after_two_turns(harness)
        first = env.seed
        assert first != 7
        await harness.send(verify())
        await until(lambda: len(harness.engine.requests) == 3)
        harness.engine.feed("train-5.1-v2", [7], 2, origins=[NEW], end="stop")
        await until(lambda: len(harness.engine.requests) == 4)
        assert env.seed == first

    run(Counting, scenario)


def test_held_out_samples_have_environments_too() -> None:
    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await harness.send(tg.Evaluate(0, 3, PROMPT, 7))
        await until(lambda: harness.engine.requests)
        harness.engine.feed("eval-0.3", [3], 1, end="stop")
        await until(lambda: len(harness.engine.requests) == 2)
        harness.engine.feed("eval-0.3+1", [9], 1, end="stop")
        await until(lambda: any(isinstance(m, fg.EvaluationSample) for m in harness.control.sent))
        (sample,) = [m for m in harness.control.sent if isinstance(m, fg.EvaluationSample)]
        assert sample.reward == 2.0

    run(Counting, scenario)
