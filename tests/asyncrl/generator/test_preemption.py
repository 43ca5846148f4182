"""Preemption of run-ahead by due samples."""

from __future__ import annotations

from typing import Any

from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play, settle

from asyncrl.generator.process import choose_preemptions
from asyncrl.generator.sample_state import SampleGeneration
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages import to_generator as tg


def test_due_samples_take_the_slots_of_run_ahead_which_resumes_from_its_tokens():
    async def scenario(harness: GeneratorHarness) -> None:
        ahead = [SampleId(group=8, sample=0), SampleId(group=9, sample=0)]
        for sample in ahead:  # two slots
            await harness.send(tg.Generate(sample, PROMPT, 7, priority=1))
            harness.engine.feed(f"train-{sample}", [3], 1)
        await settle()
        harness.engine.unreported["train-9.0"] = ([4], 1)
        await harness.send(tg.Generate(SAMPLE, PROMPT, 5))
        assert harness.engine.interrupted == ["train-9.0"], "only the sample of the latest step"
        again = harness.engine.requests[-1]
        assert (again.request_id, again.priority, again.kept) == ("train-9.0+1", 1, None)
        assert again.prefix_tokens.tolist() == [3, 4]
        assert [one.order for one in harness.engine.requests] == [8, 9, 5, 9], "data order"
        assert again.sampling.seed == 7
        other = SampleId(group=5, sample=0)
        await harness.send(tg.Generate(other, PROMPT, 5))
        assert harness.engine.interrupted == ["train-9.0", "train-8.0"]
        preempted = harness.process._metrics.preempted
        assert preempted._counter._value.get() == 2
        harness.engine.feed("train-9.0+1", [5], 2, end="stop")
        await settle()
        assert [(f.sample, f.length, f.oldest_version) for f in harness.finished()] == [
            (ahead[1], 3, 1)
        ]

    play(scenario)


def test_only_run_ahead_with_a_slot_is_preempted_and_no_more_than_needed():
    def generation(group: int, priority: int, **state: Any) -> SampleGeneration:
        one = SampleGeneration(SampleId(group=group, sample=0), PROMPT, 1, priority)
        for name, value in state.items():
            setattr(one, name, value)
        return one

    def groups(generations: list[SampleGeneration], **space: Any) -> list[int]:
        return [one.sample.group for one in choose_preemptions(generations, **space)]

    ahead = [
        generation(9, 2, has_slot=True),
        generation(7, 1, has_slot=True),
        generation(8, 1),
    ]
    assert groups(ahead, slots=1) == [], "run-ahead alone may wait in the engine's queue"
    due = [generation(1, 0), generation(2, 0)]
    assert groups(due + ahead, slots=4) == []
    assert groups(due + ahead, slots=3) == [9]
    assert groups(due + ahead, slots=2) == [9, 7]
    assert groups([generation(1, 0, has_slot=True), *ahead], slots=3) == [], "it has a slot"
    assert groups([due[0], *ahead], slots=8, kv_full=True) == [9]
    giving_back = generation(6, 1, has_slot=True, interrupting=True)
    assert groups([due[0], giving_back, *ahead], slots=3) == [], "its slot is free soon"
    assert groups([*due, giving_back, *ahead], slots=3) == [9]
    held = [generation(n, 0, previously_held="held") for n in range(60)]
    many = [generation(n, 1, has_slot=True) for n in range(100, 164)]
    assert len(groups(held + many, slots=64)) == 16, "they take turns in a quarter of the slots"
    assert len(groups(held + many[:4], slots=4)) == 4, "of few slots they get all"
