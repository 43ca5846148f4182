"""Deadlines of samples, with a fake engine."""

from __future__ import annotations

from typing import Any

import numpy as np
from counting_environments import Counting, run, until
from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play, settle

from asyncrl.generator.sample_state import SampleGeneration
from asyncrl.wire.messages import to_generator as tg


def test_a_sample_past_its_deadline_ends_with_the_tokens_that_it_has():
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7, deadline_seconds=1e-9))
        harness.process.end_overdue()
        assert not harness.engine.interrupted, "it has no token yet"
        harness.engine.feed("train-5.1", [3], 1)
        harness.engine.unreported["train-5.1"] = ([4], 1)
        await settle()
        harness.process.end_overdue()
        await settle()
        assert [(f.length, f.finish_reason) for f in harness.finished()] == [(2, "deadline")]

    play(scenario)


def test_a_deadline_that_passes_between_two_attempts_ends_the_sample():
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7, deadline_seconds=1e-9))
        harness.engine.feed("train-5.1", [3], 1)
        await settle()
        harness.process.samples.interrupt_all()  # as for the copy of unfinished samples
        await settle()
        harness.process.end_overdue()
        harness.process.samples.resume_all()
        await settle()
        assert [(f.length, f.finish_reason) for f in harness.finished()] == [(1, "deadline")]
        assert len(harness.engine.requests) == 1

    play(scenario)


def test_a_deadline_that_comes_with_a_turns_last_token_ends_the_sample_after_the_answer():
    async def scenario(harness: GeneratorHarness, env: Any, pool: Any) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7, deadline_seconds=5.0))
        await until(lambda: harness.engine.requests)
        harness.engine.feed("train-5.1", [3], 1)
        await settle()
        (generation,) = harness.process.samples.in_generation
        assert generation.first_token_at is not None
        generation.first_token_at -= 6
        interrupt = harness.engine.interrupt

        def stop_was_drawn(name: str) -> None:
            harness.engine.feed(name, [4], 1, end="stop")

        harness.engine.interrupt = stop_was_drawn  # type: ignore[method-assign]
        harness.process.end_overdue()
        await until(harness.finished)
        harness.engine.interrupt = interrupt  # type: ignore[method-assign]
        assert [(f.length, f.finish_reason) for f in harness.finished()] == [(3, "deadline")]
        assert env.log == ["reset ?", "3 4"]
        assert len(harness.engine.requests) == 1

    run(Counting, scenario)


def test_a_pause_does_not_count_towards_the_deadline():
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7, deadline_seconds=1000.0))
        harness.engine.feed("train-5.1", [3], 1)
        await settle()
        (generation,) = harness.process.samples.in_generation
        await harness.send(tg.Pause())
        assert generation.first_token_at is not None
        generation.first_token_at -= 2000.0
        started = generation.first_token_at
        harness.process.end_overdue()
        assert not harness.engine.interrupted
        await harness.send(tg.Resume())
        assert generation.first_token_at > started
        harness.process.end_overdue()
        assert harness.engine.interrupted == ["train-5.1"]

    play(scenario)


def test_a_verification_gets_a_deadline_of_its_own():
    generation = SampleGeneration(SAMPLE, PROMPT, 7)
    generation.builder.append(
        tokens=np.array([3], np.int32),
        logprobs=np.zeros(1, np.float32),
        topk_ids=np.array([[3]], np.int32),
        topk_logprobs=np.zeros((1, 1), np.float32),
        noise_seeds=np.full(1, 17, np.uint64),
        provenance=np.zeros(1, np.uint8),
        policy_version=1,
    )
    generation.first_token_at, generation.expired = 1.0, True
    assert generation.request_verification(9, 2)
    assert generation.end_attempt("abort") is None
    generation.begin_pending_verification()
    assert (generation.first_token_at, generation.expired) == (None, False)
