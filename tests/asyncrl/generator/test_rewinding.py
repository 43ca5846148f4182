"""Another trainer continues from an older version: what a generator keeps, with a fake engine."""

from __future__ import annotations

from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play, settle

from asyncrl.rollout.trajectory import UNKNOWN_VERSION, SampleId
from asyncrl.wire.messages import data
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.weights.layout import WeightManifest

OTHER = SampleId(group=5, sample=2)


async def install(harness: GeneratorHarness, version: int, lineage: int = 0) -> None:
    manifest = WeightManifest(version, "f", 64, ())
    await harness.send(tg.InstallWeights(manifest, lineage=lineage))


def answers(harness: GeneratorHarness) -> list[tuple[int, int]]:
    return [(m.lineage, m.policy_version) for m in harness.control.sent if type(m) is fg.Rewound]


def oldest(harness: GeneratorHarness) -> list[int]:
    return [finished.oldest_version for finished in harness.finished()]


def test_a_running_sample_continues_after_tokens_of_an_unknown_policy():
    async def scenario(harness: GeneratorHarness) -> None:
        await install(harness, 3)
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3], 3)
        harness.engine.unreported["train-5.1"] = ([4], 3)
        await settle()
        await harness.send(tg.Rewind(1, lineage=1))
        assert harness.engine.interrupted == ["train-5.1"]
        assert answers(harness) == [(1, -1)]
        assert len(harness.engine.requests) == 1, "its weights are gone"
        await install(harness, 3)  # of the lost trainer: it was on its way
        assert harness.engine.staged == [3]
        assert len(harness.engine.requests) == 1
        await install(harness, 1, lineage=1)
        again = harness.engine.requests[-1]
        assert again.request_id == "train-5.1-l1+1"
        assert again.prefix_tokens.tolist() == [3, 4]
        assert (again.sampling.seed, again.priority) == (7, 2), "it runs two versions ahead"
        harness.engine.feed("train-5.1-l1+1", [5], 1, end="stop")
        await settle()
        assert oldest(harness) == [UNKNOWN_VERSION]
        # Version 2 of the new trainer is another policy than the version 2 before.
        await harness.send(tg.Verify((SAMPLE,), (9,), 2))
        kept = harness.engine.requests[-1].kept
        assert kept is not None
        assert kept.tokens.tolist() == [3, 4, 5]
        assert kept.logprobs.tolist() == [-3.5, -3.5, -1.5], "with which they were drawn"
        harness.engine.feed("train-5.1-v2-l1", [3, 4, 5], 2, verified=3, end="stop")
        await settle()
        assert oldest(harness) == [UNKNOWN_VERSION, 2]

    play(scenario)


def test_held_tokens_of_versions_that_are_not_gone_stay_as_they_are():
    async def scenario(harness: GeneratorHarness) -> None:
        await install(harness, 3)
        for sample, version in ((SAMPLE, 1), (OTHER, 2)):
            await harness.send(tg.Generate(sample, PROMPT, 7))
            harness.engine.feed(f"train-{sample}", [3], version, end="stop")
        await settle()
        await harness.send(tg.Rewind(1, lineage=1))
        await install(harness, 1, lineage=1)
        await harness.send(tg.Verify((SAMPLE, OTHER), (8, 9), 1))
        # The first one needs no verification and says so.
        assert [f.sample for f in harness.finished()] == [SAMPLE, OTHER, SAMPLE]
        assert oldest(harness) == [1, 2, 1]
        assert harness.engine.requests[-1].request_id == "train-5.2-v1-l1"

    play(scenario)


def test_a_verification_by_a_policy_that_is_gone_does_not_count():
    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3, 4], 1)
        await install(harness, 2)
        await harness.send(tg.Verify((SAMPLE,), (8,), 2))
        harness.engine.feed("train-5.1-v2", [3], 2, verified=1)
        await settle()
        await harness.send(tg.Rewind(1, lineage=1))
        await install(harness, 1, lineage=1)
        await install(harness, 2, lineage=1)
        await harness.send(tg.Verify((SAMPLE,), (9,), 2))
        again = harness.engine.requests[-1]
        assert again.kept is not None
        assert (again.kept.tokens.tolist(), again.sampling.seed) == ([3], 9)

    play(scenario)


def test_nothing_happens_to_a_generator_that_has_only_versions_that_are_not_gone():
    async def scenario(harness: GeneratorHarness) -> None:
        await install(harness, 2)
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        await harness.send(tg.Rewind(2, lineage=1))
        assert answers(harness) == [(1, 2)]
        assert not harness.engine.interrupted

    play(scenario)


def test_no_sample_continues_before_weights_of_the_last_lineage_are_installed():
    async def scenario(harness: GeneratorHarness) -> None:
        await install(harness, 3)
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        await harness.send(tg.Rewind(1, lineage=1))
        await harness.send(tg.Rewind(5, lineage=2))  # the second trainer came further and was lost
        assert answers(harness) == [(1, -1), (2, -1)]
        await install(harness, 1, lineage=1)
        assert len(harness.engine.requests) == 1
        await install(harness, 5, lineage=2)
        assert len(harness.engine.requests) == 2

    play(scenario)


def test_a_paused_generator_rewinds_and_starts_nothing_until_it_may():
    async def scenario(harness: GeneratorHarness) -> None:
        await install(harness, 3)
        await harness.send(tg.Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3], 1, end="stop")
        await settle()
        await harness.send(tg.Pause())
        await harness.send(tg.Verify((SAMPLE,), (9,), 2))  # waits for the engine
        await harness.send(tg.Rewind(1, lineage=1))
        await harness.send(tg.Resume())
        assert len(harness.engine.requests) == 1, "its weights are gone"
        await install(harness, 1, lineage=1)
        assert harness.engine.requests[-1].kept is not None

    play(scenario)


def test_the_new_trainer_gets_no_delivery_that_was_for_the_lost_one():
    async def scenario(harness: GeneratorHarness) -> None:
        for sample in (SAMPLE, OTHER):
            await harness.send(tg.Generate(sample, PROMPT, 7))
            harness.engine.feed(f"train-{sample}", [3], 0, end="stop")
        await settle()
        await harness.send(tg.Deliver(0, (SAMPLE,)))
        harness.rewards.gate.clear()
        await harness.send(tg.Generate(SampleId(5, 3), PROMPT, 7))
        harness.engine.feed("train-5.3", [3], 0, end="stop")
        await settle()
        await harness.send(tg.Deliver(0, (OTHER, SampleId(5, 3))))  # waits for a reward
        await harness.send(tg.Discard((SAMPLE,)))
        await harness.send(tg.Rewind(0, lineage=1))
        harness.rewards.gate.set()
        await settle()
        assert [delivery.sample for delivery in harness.data.sent] == [SAMPLE]
        assert harness.process.deliveries.unacknowledged == 0
        await harness.send(tg.Deliver(0, (OTHER,), lineage=1))
        assert [delivery.lineage for delivery in harness.data.sent] == [0, 1]
        # The lost trainer had sent this before; it acknowledges nothing of the new lineage.
        harness.data.inbox.put_nowait(data.Received(OTHER, lineage=0))
        await settle()
        assert harness.process.deliveries.unacknowledged == 1
        harness.data.inbox.put_nowait(data.Received(OTHER, lineage=1))
        await settle()
        assert harness.process.deliveries.unacknowledged == 0

    play(scenario)


def test_held_out_samples_of_weights_that_are_gone_are_forgotten():
    async def scenario(harness: GeneratorHarness) -> None:
        await install(harness, 3)
        await harness.send(tg.Evaluate(1, 0, PROMPT, 5))
        harness.engine.feed("eval-1.0", [3], 3)
        await settle()
        await harness.send(tg.Rewind(1, lineage=1))
        assert not harness.engine.serving
        assert answers(harness) == [(1, -1)]

    play(scenario)
