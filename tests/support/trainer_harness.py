"""A trainer process with a fake learner, among fakes of its peers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from deliveries_of import delivery_of, order_of
from generator_harness import FakeLine
from step_records import full_step

from asyncrl.config.run_section import RunSection
from asyncrl.monitoring.metrics.metrics import TrainerMetrics, new_registry
from asyncrl.monitoring.records.timeline import Timeline
from asyncrl.monitoring.records.trained_samples import read_trained_samples
from asyncrl.rollout.trajectory import SampleId, Trajectory
from asyncrl.trainer.base.errors import CheckpointUnwritable
from asyncrl.trainer.learner import check_trajectory
from asyncrl.trainer.objective.logprob_mismatch import SUMS
from asyncrl.trainer.ranks import ALONE
from asyncrl.trainer.sharding.lockstep import Lockstep
from asyncrl.trainer_process.checkpoints import Checkpoints
from asyncrl.trainer_process.delivery_check import EARLY_BYTES, GroupQueue, Intake
from asyncrl.trainer_process.process import TrainerProcess
from asyncrl.trainer_process.sample_log import ShownSamples, TrainedSampleLog
from asyncrl.trainer_process.step_trainer import StepTrainer, TrainerRecords
from asyncrl.wire.messages import data, to_trainer
from asyncrl.wire.records.step import StalenessMetrics, TrainedStep
from asyncrl.wire.transport.refusals import Refusals
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import Fingerprint
from asyncrl.wire.weights.writer import WeightPublisher

GROUP_SIZE = 2


class FakeLearner:
    """Remembers the groups of each step."""

    initial_weights = "those of the test"
    world = ALONE
    lockstep = Lockstep(ALONE)

    def __init__(self) -> None:
        self.policy_version = self.staleness = 0
        self.groups: list[list[int]] = [[]]
        self.calls: list[int] = []
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

    def add_groups(self, groups: Sequence[Any]) -> list[torch.Tensor]:
        for trajectories, _rewards in groups:
            assert len(trajectories) == GROUP_SIZE
            self.groups[-1].append(trajectories[0].id.group)
        self.calls.append(len(groups))
        self.added.set()
        return [torch.zeros((GROUP_SIZE, SUMS), dtype=torch.float64) for _ in groups]

    def step(self) -> Any:
        self.policy_version += 1
        self.groups.append([])
        whole = full_step()
        return msgspec.structs.replace(
            whole,
            staleness=StalenessMetrics(max=self.staleness),
            learning=msgspec.structs.replace(whole.learning, optimizer_steps=1),
        )

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [("w", torch.full((3,), float(self.policy_version)))]

    def fingerprint(self, dtype: torch.dtype) -> Fingerprint:
        return fingerprint(self.tensors(), dtype)

    def pending(self, *, copied: bool) -> Any:
        return SimpleNamespace(version=self.policy_version, is_copied=copied)

    def settle(self) -> float:
        return 0.0

    def write(
        self,
        pending: Any,
        directory: Path,
        steps: Sequence[TrainedStep] = (),
        given_up: threading.Event | None = None,
    ) -> None:
        version = pending.version
        self.attempts.append(version)
        self.disk_answers.wait(20)
        if given_up is not None and given_up.is_set():
            raise CheckpointUnwritable(f"{directory} was given up", "hanging")
        if self.disk_is_full(version):
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

    address = "ipc:///deliveries"

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.acknowledged: list[SampleId] = []
        self.asked: list[SampleId] = []
        self.refusals = Refusals()

    async def receive(self) -> tuple[str, Any]:
        return await self.inbox.get()

    def listen_again(self) -> bool:
        return False

    def send_soon(self, _peer: str, message: data.ToGeneratorData) -> None:
        asks = isinstance(message, data.SendAgain)
        (self.asked if asks else self.acknowledged).append(message.sample)


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
        samples_follow_policy: bool = True,
        check: Any = None,
        stops: bool = True,
        asynchronous: bool = True,
        early_bytes: int = EARLY_BYTES,
    ) -> None:
        self.learner, self.control, self.hub = FakeLearner(), FakeLine(), FakeHub()
        self.registry = new_registry()
        metrics = TrainerMetrics.register(self.registry, "trainer")
        self.samples = TrainedSampleLog(
            directory / "samples",
            FakeTokenizer(),
            RunSection(log_sample_tokens=True),
            metrics,
            labels=("score", "environment"),
        )
        shown = ShownSamples(FakeTokenizer(), 3)
        records = TrainerRecords(
            metrics, Timeline(None, "trainer"), self.samples, check, shown=shown
        )
        learner: Any = self.learner
        control: Any = self.control
        hub: Any = self.hub
        queue = GroupQueue(GROUP_SIZE)
        self.process = TrainerProcess(
            StepTrainer(
                learner,
                publisher,
                records,
                engine_dtype=torch.bfloat16,
                samples_follow_policy=samples_follow_policy,
            ),
            queue,
            Intake(
                queue,
                self.learner.check_trajectory,
                functions=2,
                steps=100,
                early_bytes=early_bytes,
            ),
            Checkpoints(
                learner,
                directory,
                every=every,
                limit_seconds=limit,
                records=records,
                asynchronous=asynchronous,
            ),
            control,
            hub,
            records,
            groups_per_step=2,
            in_order=in_order,
            stops_on_wrong_policy=stops,
        )

    def deliver(self, group: int, *, step: int, terms: tuple[float, ...] = ()) -> None:
        """Order a whole group and queue it."""
        samples = [SampleId(group, sample) for sample in range(GROUP_SIZE)]
        deliveries = [delivery_of(one, step=step, version=0, terms=terms) for one in samples]
        self.control.inbox.put_nowait(order_of("g0", *deliveries))
        for delivery in deliveries:
            self.hub.inbox.put_nowait(("g0", delivery))

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for what the process does with what it was sent."""
        while not condition():  # noqa: ASYNC110 - `play` has the deadline
            await asyncio.sleep(0)

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
    **settings: Any,
) -> TrainerHarness:
    """Run a scenario with a `TrainerHarness` of these settings; shut down afterwards."""

    async def run() -> TrainerHarness:
        with WeightPublisher(directory, "run") as publisher:
            harness = TrainerHarness(directory, publisher, every=every, **settings)
            async with asyncio.timeout(60):
                harness.running = asyncio.create_task(harness.process.run(metrics_port=None))
                try:
                    await scenario(harness)
                finally:
                    harness.control.inbox.put_nowait(to_trainer.Shutdown(checkpoint))
                    await harness.running
                    await harness.samples.close()
            return harness

    return asyncio.run(run())
