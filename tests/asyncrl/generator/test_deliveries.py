"""Rewards and deliveries of held samples, with a fake engine."""

from __future__ import annotations

from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play, settle, verify

from asyncrl.errors import AsyncrlError
from asyncrl.generator import deliveries
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages import data
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.messages.data import digest_of


def test_a_delivery_waits_for_the_reward_and_a_slot_does_not():
    async def scenario(harness: GeneratorHarness) -> None:
        harness.rewards.gate.clear()
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        assert [f.length for f in harness.finished()] == [2]
        await harness.send(verify())
        harness.engine.feed("train-5.1-v2", [3, 4], 2, verified=2, end="stop")
        await settle()
        assert await harness.delivered() == []
        assert harness.process.deliveries.unrewarded == (2, 1)
        harness.rewards.gate.set()
        await settle()
        assert harness.process.deliveries.unrewarded == (0, 0)
        assert [(delivery.reward, delivery.terms) for delivery in harness.data.sent] == [
            (2.0, (2.0, 0.5))
        ]
        assert harness.rewards.asked == ["3 4"]

    play(scenario)


def test_a_failed_reward_is_reported_at_delivery():
    async def scenario(harness: GeneratorHarness) -> None:
        harness.rewards.error = AsyncrlError("no reward function 'x'")
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        assert await harness.delivered() == []
        told = [m for m in harness.control.sent if isinstance(m, fg.SampleFailed)]
        assert [(m.sample, m.reason) for m in told] == [(SAMPLE, "no reward function 'x'")]

    play(scenario)


def test_a_sample_that_is_discarded_while_its_reward_is_computed_is_not_delivered():
    async def scenario(harness: GeneratorHarness) -> None:
        harness.rewards.gate.clear()
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        await harness.send(tg.Deliver(2, (SAMPLE,)))
        await harness.send(tg.Discard((SAMPLE,)))
        harness.rewards.gate.set()
        await settle()
        assert not harness.data.sent

    play(scenario)


def test_a_delivery_is_sent_again_until_it_is_acknowledged(monkeypatch):
    monkeypatch.setattr(deliveries, "RESEND_SECONDS", 0.01)

    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        await harness.send(tg.Deliver(2, (SAMPLE,)))
        await harness.data.wait_until_sent(3)
        first, *again = harness.data.sent
        assert all(delivery == first for delivery in again)
        waiting = harness.process.deliveries._unacknowledged[SAMPLE]
        assert waiting.patience == 0.01 * 2 ** (waiting.times - 1), "it doubles each time"
        harness.data.inbox.put_nowait(data.Received(SAMPLE))
        await settle()
        assert fg.SampleDelivered("g0", SAMPLE) in harness.control.sent
        assert not harness.process.deliveries.unacknowledged

    play(scenario)


def test_a_delivery_is_sent_again_at_once_when_the_trainer_asks_for_it():
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        await harness.send(tg.Deliver(2, (SAMPLE,)))
        for answer in (data.SendAgain(SAMPLE, lineage=1), data.SendAgain(SampleId(9, 9))):
            harness.data.inbox.put_nowait(answer)
        await settle()
        assert len(harness.data.sent) == 1, "of another trainer, or not delivered"
        harness.data.inbox.put_nowait(data.SendAgain(SAMPLE))
        await settle()
        first, again = harness.data.sent
        assert again == first
        harness.data.inbox.put_nowait(data.Received(SAMPLE))
        harness.data.inbox.put_nowait(data.SendAgain(SAMPLE))
        await settle()
        assert len(harness.data.sent) == 2, "it is acknowledged"

    play(scenario)


def test_a_delivery_that_is_discarded_is_not_sent_again(monkeypatch):
    """The trainer refused it, and the controller gave its group up."""
    monkeypatch.setattr(deliveries, "RESEND_SECONDS", 0.01)

    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        (finished,) = [m for m in harness.control.sent if isinstance(m, fg.SampleFinished)]
        await harness.send(tg.Deliver(2, (SAMPLE,)))
        await harness.data.wait_until_sent(1)
        assert digest_of(harness.data.sent[0]) == finished.digest
        await harness.send(tg.Discard((SAMPLE,)))
        await settle()
        assert not harness.process.deliveries.unacknowledged

    play(scenario)


def test_a_delivery_of_a_sample_that_is_not_held_is_reported():
    async def scenario(harness: GeneratorHarness) -> None:
        assert await harness.delivered() == []
        (failed,) = [m for m in harness.control.sent if isinstance(m, fg.SampleFailed)]
        assert (failed.sample, failed.user_error) == (SAMPLE, False)

    play(scenario)
