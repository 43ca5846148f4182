"""Verification of held and running samples, with a fake engine."""

from __future__ import annotations

import time

import pytest
from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play, settle, verify

from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages import to_generator as tg


def test_a_held_sample_keeps_its_reward_if_verification_accepts_every_token():
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7, priority=1))
        harness.engine.feed("train-5.1", [3, 4, 5], 1, end="stop")
        await settle()
        assert [f.oldest_version for f in harness.finished()] == [1]
        await harness.send(verify())
        first, again = harness.engine.requests
        assert (first.kept, first.priority, first.sampling.seed) == (None, 1, 7)
        assert again.request_id == "train-5.1-v2"
        assert again.kept is not None
        assert again.kept.tokens.tolist() == [3, 4, 5]
        assert again.kept.logprobs.tolist() == [-1.5, -1.5, -1.5]
        assert (again.priority, again.sampling.seed) == (0, 9)
        harness.engine.feed("train-5.1-v2", [3, 4, 5], 2, verified=3, end="stop")
        await settle()
        assert [f.oldest_version for f in harness.finished()] == [1, 2]
        await harness.send(verify())  # none of its tokens is too old any more
        assert len(harness.engine.requests) == 2
        assert await harness.delivered() == [3.0]
        assert harness.rewards.asked == ["3 4 5"]

    play(scenario)


def test_the_longest_wait_of_a_due_sample_is_measured():
    """Run-ahead that waits is nobody's delay, and who has a slot waits no more."""

    async def scenario(harness: GeneratorHarness) -> None:
        samples = harness.process.samples
        later = time.monotonic() + 100.0
        await harness.send(tg.Generate(SampleId(9, 0), PROMPT, 7, priority=1))
        assert samples.longest_due_wait(later) == 0
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        assert samples.longest_due_wait(later) == pytest.approx(100, abs=60)
        harness.engine.feed("train-5.1", [3], 1)
        await settle()
        assert samples.longest_due_wait(later) == 0

    play(scenario)


def test_a_sample_that_verification_changed_is_rewarded_again_and_counted():
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3, 4, 5], 1, end="stop")
        await settle()
        await harness.send(verify())
        harness.engine.feed("train-5.1-v2", [3, 6], 2, verified=1)
        harness.engine.feed("train-5.1-v2", [7, 8], 2, end="stop")
        await settle()
        assert await harness.delivered() == [4.0]
        assert harness.rewards.asked == ["3 4 5", "3 6 7 8"]
        tokens = harness.generator.tokens
        assert (tokens.verified, tokens.rejected) == (1, 2)

    play(scenario)


def test_a_running_sample_is_interrupted_and_its_tokens_are_verified():
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3], 1)
        harness.engine.unreported["train-5.1"] = ([4], 1)
        await settle()
        await harness.send(verify())
        assert harness.engine.interrupted == ["train-5.1"]
        assert not harness.engine.abandoned, "tokens after the cut were lost"
        kept = harness.engine.requests[-1].kept
        assert kept is not None
        assert kept.tokens.tolist() == [3, 4]
        await harness.send(verify())  # it is being verified already
        assert len(harness.engine.requests) == 2
        harness.engine.feed("train-5.1-v2", [3, 9], 2, verified=1, end="stop")
        await settle()
        assert [(f.length, f.oldest_version) for f in harness.finished()] == [(2, 2)]

    play(scenario)


def test_a_due_sample_that_waits_for_a_slot_is_requested_again_with_the_priority_of_due_samples():
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7, priority=1))
        await harness.send(verify())
        assert harness.engine.interrupted == ["train-5.1"]
        again = harness.engine.requests[-1]
        assert (again.kept, again.priority, again.sampling.seed) == (None, 0, 9)

    play(scenario)


@pytest.mark.parametrize("version", [None, 2])
def test_a_running_sample_without_old_tokens_is_not_interrupted(version):
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        if version is not None:
            harness.engine.feed("train-5.1", [3], version)
            await settle()
        await harness.send(verify())
        assert len(harness.engine.requests) == 1
        harness.engine.feed("train-5.1", [4], 2, end="stop")
        await settle()
        assert harness.finished()[0].oldest_version == 2

    play(scenario)


def test_a_second_verification_keeps_the_tokens_that_the_first_has_not_judged():
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        await harness.send(verify(min_version=2))
        await harness.send(verify(seed=10, min_version=3))
        kept = harness.engine.requests[-1].kept
        assert kept is not None
        assert kept.tokens.tolist() == [3, 4]
        assert harness.engine.interrupted == ["train-5.1-v2"]
        assert harness.engine.requests[-1].sampling.seed == 10

    play(scenario)


def test_nothing_is_verified_while_paused_and_a_discarded_sample_is_forgotten():
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        await harness.send(tg.Pause())
        await harness.send(verify())
        assert len(harness.engine.requests) == 1
        await harness.send(tg.Resume())
        assert len(harness.engine.requests) == 2
        await harness.send(tg.Discard((SAMPLE,)))
        assert harness.engine.abandoned == ["train-5.1-v2"]
        harness.engine.feed("train-5.1-v2", [3, 4], 2, verified=2, end="stop")
        await settle()
        assert len(harness.finished()) == 1

    play(scenario)


def test_a_sample_that_ends_while_it_is_interrupted_is_verified_as_a_whole():
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3], 1)
        await settle()
        harness.control.inbox.put_nowait(verify())
        harness.engine.feed("train-5.1", [4], 1, end="stop")  # in flight when the command comes
        await settle()
        assert not harness.finished()
        kept = harness.engine.requests[-1].kept
        assert kept is not None
        assert kept.tokens.tolist() == [3, 4]
        harness.engine.feed("train-5.1-v2", [3, 4], 2, verified=2, end="stop")
        await settle()
        assert [(f.length, f.oldest_version) for f in harness.finished()] == [(2, 2)]

    play(scenario)


def test_a_sample_without_old_tokens_that_ends_while_it_is_interrupted_is_finished():
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7, priority=1))
        harness.control.inbox.put_nowait(verify())  # no token of it was reported
        harness.engine.feed("train-5.1", [3, 4], 2, end="stop")  # in flight when the command comes
        await settle()
        assert harness.engine.interrupted == ["train-5.1"]
        assert len(harness.engine.requests) == 1, "generation continued after the stop token"
        assert [(f.length, f.oldest_version) for f in harness.finished()] == [(2, 2)]

    play(scenario)
