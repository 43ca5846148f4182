"""The trainer process with a fake learner: which groups a step trains on, and what is saved."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from deliveries_of import delivery_of, order_of
from generator_harness import FakeLine
from step_records import full_step

from asyncrl.config import RunSection
from asyncrl.errors import AsyncrlError, first_error
from asyncrl.processes.trainer.checkpoints import Checkpoints
from asyncrl.processes.trainer.group_queue import GroupQueue
from asyncrl.processes.trainer.intake import Intake
from asyncrl.processes.trainer.process import TrainerProcess
from asyncrl.processes.trainer.sample_log import TrainedSampleLog, drop_repeated
from asyncrl.processes.trainer.step_trainer import StepTrainer, TrainerRecords
from monitoring.metrics import TrainerMetrics, new_registry
from monitoring.timeline import Timeline
from monitoring.trained_samples import read_trained_samples
from rollout.trajectory import SampleId, Trajectory
from trainer.errors import CheckpointUnwritable
from trainer.group_check import check_trajectory
from wire.messages import data, from_trainer, to_trainer
from wire.records import TrainedStep
from wire.refusals import Refusals
from wire.weights.fingerprint import fingerprint
from wire.weights.layout import Fingerprint
from wire.weights.writer import WeightPublisher

GROUP_SIZE = 2


class FakeLearner:
    """Remembers the groups of each step."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.groups: list[list[int]] = [[]]
        self.saved: list[Path] = []
        self.saved_steps: list[list[int]] = []
        self.attempts: list[int] = []
        self.disk_is_full: Callable[[int], bool] = lambda _: False
        self.added = threading.Event()
        self.disk_answers = threading.Event()
        self.disk_answers.set()
        self.logged_at_save = 0

    def check_trajectory(self, trajectory: Trajectory) -> None:
        check_trajectory(trajectory, 1000, self.policy_version)

    def add_group(self, trajectories: Sequence[Trajectory], _rewards: Any) -> None:
        assert len(trajectories) == GROUP_SIZE
        self.groups[-1].append(trajectories[0].id.group)
        self.added.set()

    def step(self) -> Any:
        self.policy_version += 1
        self.groups.append([])
        return full_step()

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [("w", torch.full((3,), float(self.policy_version)))]

    def fingerprint(self, dtype: torch.dtype) -> Fingerprint:
        return fingerprint(self.tensors(), dtype)

    def save(
        self, directory: Path, steps: Sequence[TrainedStep], given_up: threading.Event
    ) -> None:
        self.attempts.append(self.policy_version)
        self.disk_answers.wait(20)
        if given_up.is_set():
            raise CheckpointUnwritable(f"{directory} was given up", "hanging")
        if self.disk_is_full(self.policy_version):
            raise CheckpointUnwritable(f"{directory} cannot be written", "disk_full")
        self.saved.append(directory)
        self.saved_steps.append([one.step for one in steps])
        self.logged_at_save = len(list(read_trained_samples(directory.parent / "samples")))


class FakeTokenizer:
    """Decodes token 4 as a lone surrogate, which UTF-8 does not have."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(0xD800) if token == 4 else chr(97 + token) for token in tokens)


class FakeHub:
    """Deliveries from one generator."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.acknowledged: list[SampleId] = []
        self.refusals = Refusals()

    async def receive(self) -> tuple[str, Any]:
        return await self.inbox.get()

    async def send(self, _peer: str, message: data.Received) -> None:
        self.acknowledged.append(message.sample)


class TrainerHarness:
    """A trainer process of two groups a step among fakes. It saves every `every` steps."""

    running: asyncio.Task[None]

    def __init__(
        self,
        directory: Path,
        publisher: WeightPublisher,
        *,
        every: int = 2,
        in_order: bool = False,
        limit: float = 600.0,
    ) -> None:
        self.learner, self.control, self.hub = FakeLearner(), FakeLine(), FakeHub()
        self.registry = new_registry()
        metrics = TrainerMetrics.register(self.registry, "trainer")
        self.samples = TrainedSampleLog(
            directory / "samples", FakeTokenizer(), RunSection(log_sample_tokens=True), metrics
        )
        records = TrainerRecords(metrics, Timeline(None, "trainer"), self.samples)
        learner: Any = self.learner
        control: Any = self.control
        hub: Any = self.hub
        queue = GroupQueue(GROUP_SIZE)
        self.process = TrainerProcess(
            StepTrainer(learner, publisher, records, engine_dtype=torch.bfloat16),
            queue,
            Intake(queue, self.learner.check_trajectory, max_early=64, functions=2),
            Checkpoints(learner, directory, every=every, limit_seconds=limit, records=records),
            control,
            hub,
            records,
            groups_per_step=2,
            in_order=in_order,
        )

    def deliver(self, group: int, *, step: int) -> None:
        """Order a whole group and queue it."""
        samples = [SampleId(group, sample) for sample in range(GROUP_SIZE)]
        deliveries = [delivery_of(sample, step=step, version=0) for sample in samples]
        self.control.inbox.put_nowait(order_of("g0", *deliveries))
        for delivery in deliveries:
            self.hub.inbox.put_nowait(("g0", delivery))

    async def sent(self, kind: type[Any], count: int) -> list[Any]:
        """Wait until the controller was sent this many messages of a kind."""
        while True:
            found = [message for message in self.control.sent if isinstance(message, kind)]
            if len(found) >= count:
                return found
            await self.control.wait_until_sent(len(self.control.sent) + 1)


def play(
    directory: Path,
    scenario: Any,
    *,
    checkpoint: bool = False,
    every: int = 2,
    in_order: bool = False,
    limit: float = 600.0,
) -> TrainerHarness:
    """Run a scenario; shut down afterwards."""

    async def run() -> TrainerHarness:
        with WeightPublisher(directory, "run") as publisher:
            harness = TrainerHarness(
                directory, publisher, every=every, in_order=in_order, limit=limit
            )
            async with asyncio.timeout(20):
                harness.running = asyncio.create_task(harness.process.run(metrics_port=None))
                try:
                    await scenario(harness)
                    harness.control.inbox.put_nowait(to_trainer.Shutdown(checkpoint))
                finally:
                    await harness.running
                    await harness.samples.close()
            return harness

    return asyncio.run(run())


def test_a_step_is_taken_when_the_groups_of_its_plan_are_accumulated(tmp_path: Path) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        harness.deliver(1, step=0)
        harness.deliver(2, step=1)  # waits for its step
        harness.deliver(0, step=0)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (0, 1)))
        (finished,) = await harness.sent(from_trainer.StepFinished, 1)
        assert (finished.step, finished.groups) == (0, (0, 1))
        assert finished.manifest.policy_version == 1
        held_by_an_engine = torch.ones(3, dtype=torch.bfloat16)
        assert finished.manifest.fingerprint == fingerprint([("w", held_by_an_engine)])

    harness = play(tmp_path, scenario)
    assert [sorted(groups) for groups in harness.learner.groups] == [[0, 1], [2]]
    assert len(harness.hub.acknowledged) == 3 * GROUP_SIZE
    assert isinstance(harness.control.sent[-1], from_trainer.Goodbye)


def test_a_repeatable_run_accumulates_groups_in_order(tmp_path: Path) -> None:
    """Whatever the order of arrival; a failed group is skipped once the plan says so."""

    async def scenario(harness: TrainerHarness) -> None:
        for group in (1, 2, 0):
            harness.deliver(group, step=group // 2)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (0, 1)))
        await harness.sent(from_trainer.StepFinished, 1)
        harness.deliver(5, step=2)
        harness.deliver(3, step=1)
        for step, groups in ((1, (2, 3)), (2, (5,))):
            harness.control.inbox.put_nowait(to_trainer.StepPlan(step, groups))
        await harness.sent(from_trainer.StepFinished, 3)

    harness = play(tmp_path, scenario, in_order=True)
    assert harness.learner.groups == [[0, 1], [2, 3], [5], []]


def test_the_terms_of_a_steps_rewards_are_averaged_over_the_samples_that_have_them(
    tmp_path: Path,
) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        terms = ((0.5, 1.0), (), (1.0, 0.0), (0.0, 0.5))  # the second reward failed
        for index, each in enumerate(terms):
            sample = SampleId(index // GROUP_SIZE, index % GROUP_SIZE)
            delivery = delivery_of(sample, terms=each)
            harness.control.inbox.put_nowait(order_of("g0", delivery))
            harness.hub.inbox.put_nowait(("g0", delivery))
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (0, 1)))
        harness.deliver(2, step=1)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(1, (2,)))
        first, second = await harness.sent(from_trainer.StepFinished, 2)
        assert first.reward_terms == (0.5, 0.5)
        assert second.reward_terms == ()

    play(tmp_path, scenario)


def test_checkpoints_are_written_when_due_and_once_per_version(tmp_path: Path) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        for step in range(2):
            harness.deliver(step, step=step)
            harness.control.inbox.put_nowait(to_trainer.StepPlan(step, (step,)))
        (written,) = await harness.sent(from_trainer.CheckpointWritten, 1)
        assert written == from_trainer.CheckpointWritten(2, str(tmp_path / "step-000002"))

    harness = play(tmp_path, scenario, checkpoint=True)
    assert harness.learner.saved == [tmp_path / "step-000002"]


def test_a_shutdown_with_checkpoint_saves_a_version_that_is_not_due(tmp_path: Path) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        harness.deliver(0, step=0)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (0,)))
        await harness.sent(from_trainer.StepFinished, 1)

    assert play(tmp_path, scenario).learner.saved == []
    assert play(tmp_path, scenario, checkpoint=True).learner.saved == [tmp_path / "step-000001"]


def test_training_continues_on_a_full_disk_and_checkpoints_are_tried_again(
    tmp_path: Path,
) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        harness.learner.disk_is_full = lambda version: version != 12
        for step in range(13):
            harness.deliver(step, step=step)
            harness.control.inbox.put_nowait(to_trainer.StepPlan(step, (step,)))
        await harness.sent(from_trainer.StepFinished, 13)

    harness = play(tmp_path, scenario, checkpoint=True, every=4)
    # Due at 4; then after 1, 2, 4 and at most 4 steps, and when due.
    assert harness.learner.attempts == [4, 5, 7, 8, 12, 13]
    assert harness.learner.saved == [tmp_path / "step-000012"]
    assert harness.learner.saved_steps == [list(range(12))], "those of failed attempts too"
    failed = [one for one in harness.control.sent if isinstance(one, from_trainer.CheckpointFailed)]
    assert [one.retry_version for one in failed] == [5, 7, 11, 12, 14]
    assert failed[-1].policy_version == 13, "the last state, at the end"
    assert isinstance(harness.control.sent[-1], from_trainer.Goodbye)


def test_training_continues_while_a_checkpoint_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named and given up; no other is begun before the disk answers."""

    async def scenario(harness: TrainerHarness) -> None:
        async def train(step: int) -> None:
            harness.deliver(step, step=step)
            harness.control.inbox.put_nowait(to_trainer.StepPlan(step, (step,)))
            await harness.sent(from_trainer.StepFinished, step + 1)

        harness.learner.disk_answers.clear()
        await train(0)
        first = await harness.sent(from_trainer.CheckpointFailed, 1)
        await train(1)
        second = (await harness.sent(from_trainer.CheckpointFailed, 2))[1]
        assert harness.learner.attempts == [1]
        assert (first[0].cause, first[0].policy_version) == ("hanging", 1)
        assert f"{tmp_path / 'step-000001'} cannot be written: the disk has not" in first[0].reason
        assert f"finished writing {tmp_path / 'step-000001'} for" in second.reason
        harness.learner.disk_answers.set()
        hanging = [one for one in threading.enumerate() if one.name == "checkpoint"]
        for one in hanging:
            await asyncio.to_thread(one.join, 10)
        await train(2)
        (written,) = await harness.sent(from_trainer.CheckpointWritten, 1)
        assert written.policy_version == 3

    harness = play(tmp_path, scenario, every=1, limit=0.2)
    assert harness.learner.saved == [tmp_path / "step-000003"]
    assert harness.learner.saved_steps == [[0, 1, 2]]
    gc.collect()
    assert "never retrieved" not in caplog.text, "the late end of the hanging one"


def test_a_group_that_is_reported_as_failed_after_its_gradient_ends_the_run(
    tmp_path: Path,
) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        harness.deliver(0, step=0)
        await asyncio.to_thread(harness.learner.added.wait, 10)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (1,)))
        await asyncio.wait([harness.running])

    with pytest.raises(BaseExceptionGroup) as caught:
        play(tmp_path, scenario)
    error = first_error(caught.value)
    assert isinstance(error, AsyncrlError)
    assert "[0]" in str(error)


def test_a_delivery_that_is_refused_is_reported_and_the_others_are_trained_on(
    tmp_path: Path,
) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        ordered = delivery_of(SampleId(0, 0))
        forged = msgspec.structs.replace(ordered, tokens=bytes(ordered.tokens)[::-1])
        harness.control.inbox.put_nowait(order_of("g0", ordered))
        for peer, delivery in (("g1", ordered), ("g0", forged)):
            harness.hub.inbox.put_nowait((peer, delivery))
        (refused,) = await harness.sent(from_trainer.DeliveryRefused, 1)
        assert (refused.generator, refused.sample) == ("g0", SampleId(0, 0))
        harness.deliver(1, step=0)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (1,)))
        await harness.sent(from_trainer.StepFinished, 1)

    harness = play(tmp_path, scenario)
    assert harness.learner.groups == [[1], []]
    assert harness.hub.acknowledged == [SampleId(1, 0), SampleId(1, 1)]


def test_each_trained_sample_is_logged_once_and_before_its_checkpoint(tmp_path: Path) -> None:
    async def scenario(harness: TrainerHarness) -> None:
        harness.deliver(7, step=2)  # arrives before its step, which is never trained
        for step in range(2):
            harness.deliver(step, step=step)
            harness.deliver(step, step=step)  # sent again
            harness.control.inbox.put_nowait(to_trainer.StepPlan(step, (step,)))
        await harness.sent(from_trainer.CheckpointWritten, 1)

    harness = play(tmp_path, scenario)
    records = list(read_trained_samples(tmp_path / "samples"))
    assert [(one.step, one.group, one.sample) for one in records] == [
        (0, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 1),
    ]  # fmt: skip
    assert harness.learner.logged_at_save == 4
    last = records[-1]
    assert (last.prompt, last.response) == ("bc", "d?b")
    assert (last.prompt_tokens, last.response_tokens) == ([1, 2], [3, 4, 1])
    assert (last.sampled, last.generator, last.segments[0].policy_version) == (3, "g0", 0)


def test_a_sample_log_without_a_disk_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "samples").write_text("a file where the folder should be")

    async def scenario(harness: TrainerHarness) -> None:
        harness.deliver(0, step=0)
        harness.control.inbox.put_nowait(to_trainer.StepPlan(0, (0,)))
        await harness.sent(from_trainer.StepFinished, 1)

    harness = play(tmp_path, scenario)
    labels = {"process": "trainer"}
    lost = harness.registry.get_sample_value("asyncrl_unlogged_samples_total", labels)
    assert lost == GROUP_SIZE


def test_samples_that_cannot_be_dropped_do_not_end_the_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "000001.jsonl").mkdir()  # cannot be opened as a file
    drop_repeated(tmp_path, 3)
    assert "step 3 and later steps could not be dropped" in caplog.text
    assert "Is a directory" in caplog.text
