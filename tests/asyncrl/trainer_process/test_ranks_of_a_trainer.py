"""Trainer processes of two ranks, with fake learners: what they do together, and who reports it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from threaded_world import ThreadedWorld
from trainer_harness import TrainerHarness
from trainer_harness import play as play_one

from asyncrl.trainer.sharding.lockstep import Lockstep
from asyncrl.trainer_process.step_trainer import RankPart, mean_terms, sums_of
from asyncrl.wire.messages.from_trainer import CheckpointWritten, StepFinished, TrainerReady
from asyncrl.wire.messages.to_trainer import Shutdown, StepPlan, WriteCheckpoint
from asyncrl.wire.weights.writer import WeightPublisher

Scenario = Callable[[TrainerHarness, TrainerHarness], Awaitable[None]]


class Ranks:
    """Two trainer processes. The gradients of rank 1 wait until they are let go."""

    def __init__(self, folder: Path, publisher: WeightPublisher) -> None:
        self.both = [TrainerHarness(folder / str(rank), publisher, every=100) for rank in range(2)]
        self.worlds = ThreadedWorld.of(2)
        self.slow = threading.Event()
        for harness, world in zip(self.both, self.worlds, strict=True):
            harness.learner.world = world
            harness.process._steps.world = world
        add = self.both[1].learner.add_groups

        def slowly(*values: object) -> object:
            assert self.slow.wait(60)
            return add(*values)

        self.both[1].learner.add_groups = slowly

    def tell(self, *messages: object) -> None:
        """All ranks get the same, in the same order; of a plan, each its own group."""
        for message in messages:
            for rank, harness in enumerate(self.both):
                own = message
                if isinstance(message, StepPlan):
                    own = StepPlan(message.step, message.groups[rank : rank + 1])
                harness.control.inbox.put_nowait(own)


def play(folder: Path, scenario: Callable[[Ranks], Awaitable[None]]) -> Ranks:
    async def run() -> Ranks:
        with WeightPublisher(folder, "run") as publisher:
            ranks = Ranks(folder, publisher)
            async with asyncio.timeout(120):
                tasks = [
                    asyncio.create_task(one.process.run(metrics_port=None)) for one in ranks.both
                ]
                await scenario(ranks)
                await asyncio.gather(*tasks)
                for one in ranks.both:
                    await one.samples.close()
            return ranks

    return asyncio.run(run())


def test_a_step_is_taken_by_all_ranks_and_reported_by_the_first(tmp_path: Path) -> None:
    async def scenario(ranks: Ranks) -> None:
        first, second = ranks.both
        first.deliver(0, step=0)
        second.deliver(1, step=0)
        ranks.tell(StepPlan(0, (0, 1)))
        ranks.slow.set()
        await first.sent(StepFinished, 1)
        ranks.tell(Shutdown(checkpoint=True))

    ranks = play(tmp_path, scenario)
    first, second = ranks.both
    (finished,) = [one for one in first.control.sent if isinstance(one, StepFinished)]
    assert finished.groups == (0, 1)
    assert [one.learner.groups for one in ranks.both] == [[[0], []], [[1], []]]
    ready = [one for harness in ranks.both for one in harness.control.sent]
    ready = [one for one in ready if isinstance(one, TrainerReady)]
    assert [one.manifest is not None for one in ready] == [True, False]
    assert not [one for one in second.control.sent if isinstance(one, StepFinished)]
    assert [len(one.learner.attempts) for one in ranks.both] == [1, 1], "a checkpoint needs both"
    assert ranks.worlds[0].said == ranks.worlds[1].said


def test_a_plan_that_has_come_is_carried_out_by_all_or_by_none(tmp_path: Path) -> None:
    """Rank 0 is told to end while it waits for rank 1, which is told before it can begin."""

    async def scenario(ranks: Ranks) -> None:
        first, second = ranks.both
        first.deliver(0, step=0)
        second.deliver(1, step=0)
        ranks.tell(StepPlan(0, (0, 1)), Shutdown(checkpoint=False))
        ranks.slow.set()

    ranks = play(tmp_path, scenario)
    assert [one.learner.policy_version for one in ranks.both] == [1, 1]


def test_a_checkpoint_is_of_the_same_step_on_all_ranks(tmp_path: Path) -> None:
    """It is ordered after the plan of step 0, which rank 1 still computes."""

    async def scenario(ranks: Ranks) -> None:
        first, second = ranks.both
        for harness, groups in ((first, (0, 2)), (second, (1, 3))):
            for step, group in enumerate(groups):
                harness.deliver(group, step=step)
        ranks.tell(StepPlan(0, (0, 1)), WriteCheckpoint(), StepPlan(1, (2, 3)), WriteCheckpoint())
        ranks.slow.set()
        await first.sent(CheckpointWritten, 2)
        ranks.tell(Shutdown(checkpoint=False))

    ranks = play(tmp_path, scenario)
    assert [one.learner.attempts for one in ranks.both] == [[1, 2], [1, 2]]
    written = [one for one in ranks.both[0].control.sent if isinstance(one, CheckpointWritten)]
    assert [one.policy_version for one in written] == [1, 2]
    assert not [one for one in ranks.both[1].control.sent if isinstance(one, CheckpointWritten)]


def test_a_request_to_end_that_comes_while_a_checkpoint_begins_is_heard(tmp_path: Path) -> None:
    async def scenario(trainer: TrainerHarness) -> None:
        begun, told, pending = threading.Event(), threading.Event(), trainer.learner.pending

        def slowly(*, copied: bool) -> object:
            begun.set()
            assert told.wait(60)
            return pending(copied=copied)

        trainer.learner.pending = slowly  # type: ignore[method-assign]
        trainer.deliver(0, step=0)
        for message in (StepPlan(0, (0,)), WriteCheckpoint()):
            trainer.control.inbox.put_nowait(message)
        assert await asyncio.to_thread(begun.wait, 60)
        trainer.control.inbox.put_nowait(Shutdown(checkpoint=False))
        while not trainer.control.inbox.empty():  # noqa: ASYNC110 - it is read in this turn
            await asyncio.sleep(0)
        told.set()
        await asyncio.wait({trainer.running}, timeout=30)
        assert trainer.running.done(), "it waits for what does not come"

    assert play_one(tmp_path, scenario, every=100).learner.attempts == [1]


def test_results_of_reward_functions_are_averaged_over_ranks() -> None:
    parts = [
        RankPart((2, 4), 4, sums_of([(1.0, 0.5), (0.0, 0.5)]), 0.0, True),
        RankPart((), 0, sums_of([]), 3.0, True),
        RankPart((1,), 2, sums_of([(1.0, 2.0)]), 0.0, False),
    ]
    assert parts[0].terms == ((1.0, 2), (1.0, 2))
    assert mean_terms(parts) == (2 / 3, 1.0)
    assert mean_terms(parts[1:2]) == ()


def in_lockstep(ranks: Ranks) -> list[int]:
    """Make the fakes compute together as with weights in parts; counts their empty turns."""
    padded = [0, 0]
    for rank, (harness, world) in enumerate(zip(ranks.both, ranks.worlds, strict=True)):
        lockstep = Lockstep(world)
        harness.learner.lockstep = harness.process._steps._lockstep = lockstep
        add = harness.learner.add_groups

        def added(*values: object, lockstep: Lockstep = lockstep, add: Any = add) -> object:
            with lockstep.begin():
                return add(*values)

        def pad(rank: int = rank) -> None:
            padded[rank] += 1

        harness.learner.add_groups = added
        harness.learner.pad = pad
        harness.learner.weights = SimpleNamespace(take_part=lambda _dtype: None, whole=None)
    return padded


def test_with_weights_in_parts_one_rank_pads_while_the_other_computes(tmp_path: Path) -> None:
    """Rank 1 gets its group, a checkpoint to write and the end of the run when rank 0 is done."""
    padded: list[list[int]] = []

    async def scenario(ranks: Ranks) -> None:
        padded.append(in_lockstep(ranks))
        ranks.slow.set()
        first, second = ranks.both
        first.deliver(0, step=0)
        first.control.inbox.put_nowait(StepPlan(0, (0,)))
        first.control.inbox.put_nowait(WriteCheckpoint())
        await asyncio.to_thread(first.learner.added.wait, 60)
        second.deliver(1, step=0)
        second.control.inbox.put_nowait(StepPlan(0, (1,)))
        await first.sent(StepFinished, 1)
        second.control.inbox.put_nowait(WriteCheckpoint())
        await first.sent(CheckpointWritten, 1)
        first.control.inbox.put_nowait(Shutdown(checkpoint=False))
        second.control.inbox.put_nowait(Shutdown(checkpoint=False))

    ranks = play(tmp_path, scenario)
    assert [one.learner.groups for one in ranks.both] == [[[0], []], [[1], []]]
    assert padded == [[1, 1]], "each computes its group, and padding with the other's"
    assert [one.learner.attempts for one in ranks.both] == [[1], [1]]
    assert ranks.worlds[0].said == ranks.worlds[1].said
