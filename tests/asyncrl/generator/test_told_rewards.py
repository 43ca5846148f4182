"""With dynamic sampling a generator tells the controller each reward, after the sample."""

from __future__ import annotations

from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play, settle, verify

from asyncrl.errors import UserError
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg


async def finished_sample(harness: GeneratorHarness) -> None:
    """A sample of two tokens is generated; its reward may be held back."""
    harness.process.samples.tells_rewards = True
    await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
    harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
    await settle()


def told(harness: GeneratorHarness) -> list[fg.SampleRewarded]:
    return [one for one in harness.control.sent if isinstance(one, fg.SampleRewarded)]


def test_the_reward_follows_the_sample_once_it_is_known() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        harness.rewards.gate.clear()
        await finished_sample(harness)
        (finished,) = harness.finished()
        assert told(harness) == [], "the slot is free, and the reward is not known"
        harness.rewards.gate.set()
        await settle()
        assert told(harness) == [fg.SampleRewarded("g0", SAMPLE, 2.0, finished.digest)]

    play(scenario)


def test_without_dynamic_sampling_no_reward_is_told() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        assert len(harness.finished()) == 1
        assert told(harness) == []

    play(scenario)


def test_the_reward_of_a_discarded_sample_is_not_told() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        harness.rewards.gate.clear()
        await finished_sample(harness)
        await harness.send(tg.Discard((SAMPLE,)))
        harness.rewards.gate.set()
        await settle()
        assert told(harness) == []

    play(scenario)


def test_a_sample_that_need_not_be_verified_is_told_again_with_its_reward() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        await finished_sample(harness)
        await harness.send(verify(min_version=1))
        first, again = harness.finished()
        assert first == again
        assert told(harness) == 2 * [fg.SampleRewarded("g0", SAMPLE, 2.0, first.digest)]

    play(scenario)


def test_a_verified_sample_has_the_reward_of_its_new_contents() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        await finished_sample(harness)
        await harness.send(verify(min_version=2))
        harness.engine.feed("train-5.1-v2", [3], 2, verified=1)
        harness.engine.feed("train-5.1-v2", [6, 8], 2, end="stop")
        await settle()
        first, second = harness.finished()
        assert first.digest != second.digest
        assert [(one.reward, one.digest) for one in told(harness)] == [
            (2.0, first.digest),
            (3.0, second.digest),
        ]

    play(scenario)


def test_a_reward_that_fails_is_the_users_error() -> None:
    async def scenario(harness: GeneratorHarness) -> None:
        harness.rewards.error = UserError("length raised ValueError")
        await finished_sample(harness)
        (failed,) = [one for one in harness.control.sent if isinstance(one, fg.SampleFailed)]
        assert (failed.sample, failed.user_error) == (SAMPLE, True)
        assert "length raised ValueError" in failed.reason
        assert told(harness) == []

    play(scenario)
