"""From a process's message to the scheduler's command: inbox, training, command executor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_processes import FakeProgress, run_config, started_fleet, task, weights

from asyncrl.errors import UserError
from asyncrl.evaluation.fleet import FleetEvaluation
from asyncrl.evaluation.round import Accuracy
from asyncrl.run.directory import RunDirectory, read_state
from asyncrl.run.inbox import Inbox
from asyncrl.run.sample_requests import SampleRequests
from asyncrl.run.training import Training
from asyncrl.run.waiting import Waiter
from rollout.trajectory import SampleId
from scheduler.events import PauseRequested, ResumeRequested
from wire.messages import from_generator as fg
from wire.messages import from_trainer as ft
from wire.messages import to_generator as tg
from wire.messages import to_trainer as tt
from wire.records import EngineStats

G = "generator-0"


def step_finished(version: int) -> ft.StepFinished:
    numbers: Any = None  # nothing here reads them
    return ft.StepFinished(0, (0,), weights(version), numbers, numbers)


class Run:
    """A run of one step of two samples, with everything but its processes."""

    def __init__(self, path: Path, *, version: int = 0, **scheduler: object) -> None:
        sizes = {"group_size": 2, "groups_per_step": 1}
        self.config = run_config(
            run={"name": "mine", "directory": str(path), "steps": 1},
            scheduler=sizes | (scheduler or {"on_update": "keep"}),
            evaluation={"prompts": 3},
        )
        self.fleet, self.hub = started_fleet(self.config, version)
        self.progress: Any = FakeProgress()
        self.waiter = Waiter()
        parts: dict[str, Any] = {"fleet": self.fleet, "waiter": self.waiter}
        requests = SampleRequests(task(), seed=0)
        self.evaluation = FleetEvaluation(self.config.evaluation, requests, **parts)
        self.training = Training(self.config, requests, progress=self.progress, **parts)
        self.directory = RunDirectory.create(self.config, resume=False, clean=False)
        self.inbox = Inbox(
            self.directory,
            self.fleet,
            training=self.training,
            evaluation=self.evaluation,
            progress=self.progress,
            waiter=self.waiter,
        )

    async def hear(self, name: str, message: Any) -> list[tuple[str, Any]]:
        """A process sends a message; what is sent in turn."""
        await self.inbox.handle(name, message)
        return self.hub.take()

    async def begin(self) -> asyncio.Task[None]:
        """Start the training phase, up to the scheduler's first commands."""
        training = asyncio.create_task(self.training.run())
        await asyncio.sleep(0)
        await self.report()
        await asyncio.sleep(0)
        return training

    async def report(self) -> None:
        stats = EngineStats(kv_used=0.25)
        await self.inbox.handle(G, fg.GeneratorReport(G, stats, 0, 0, 0))


def test_one_step_from_the_first_request_to_the_end(tmp_path: Path) -> None:
    async def train() -> None:
        run = Run(tmp_path, on_update="keep")
        training = await run.begin()
        samples = (SampleId(0, 0), SampleId(0, 1))
        started = run.hub.take()
        assert [(name, message.sample) for name, message in started] == [(G, s) for s in samples]
        assert len({message.seed for _, message in started}) == 2
        for sample in samples:
            finished = fg.SampleFinished(G, sample, 5, 0, "stop")
            sent = await run.hear(G, finished)
        assert sent == [(G, tg.Deliver(0, samples))]
        assert await run.hear(G, fg.SampleDelivered(G, samples[0])) == []
        sent = await run.hear(G, fg.SampleDelivered(G, samples[1]))
        assert sent == [("trainer", tt.StepPlan(0, (0,)))]
        step = step_finished(1)
        sent = await run.hear("trainer", step)
        assert sent == [(G, tg.InstallWeights(weights(1)))]
        assert run.training.is_complete
        assert not run.training.is_running
        await asyncio.sleep(0)
        await run.report()
        await training
        assert [name for name, _ in run.progress.calls if name != "decided"] == [
            "training_begins", "step_finished", "training_ends",
        ]  # fmt: skip

    asyncio.run(train())


def test_pausing_reaches_the_generators(tmp_path: Path) -> None:
    async def pause() -> None:
        run = Run(tmp_path)
        await run.training.apply(PauseRequested())
        assert run.hub.take() == [], "there is no scheduler yet"
        training = await run.begin()
        run.hub.take()
        await run.training.apply(PauseRequested())
        assert run.hub.take() == [(G, tg.Pause())]
        await run.training.apply(ResumeRequested())
        assert run.hub.take() == [(G, tg.Resume())]
        training.cancel()

    asyncio.run(pause())


def test_a_failed_group_is_reported_and_a_user_error_ends_the_run(tmp_path: Path) -> None:
    async def fail() -> None:
        run = Run(tmp_path)
        training = await run.begin()
        failed = fg.SampleFailed(G, SampleId(0, 1), "too long", user_error=False)
        await run.hear(G, failed)
        assert run.progress.said == [
            "group 0 is not trained on: sample 0.1 of generator-0: too long"
        ]
        await run.hear(G, fg.Failure(G, "a reward raised", user_error=True))
        with pytest.raises(UserError, match="a reward raised"):
            await training
        assert run.fleet.generators()[0].reason == "a reward raised"

    asyncio.run(fail())


def test_unknown_senders_and_messages_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def confuse() -> None:
        run = Run(tmp_path)
        assert await run.hear("stranger", fg.Goodbye(G)) == []
        step = step_finished(9)
        assert await run.hear(G, step) == []
        assert run.fleet.weights == weights(0), "a generator publishes no weights"

    asyncio.run(confuse())
    assert "Goodbye from 'stranger', an unknown process" in caplog.text
    assert "unexpected StepFinished from generator-0" in caplog.text


def test_a_new_generator_is_recorded_and_gets_the_weights_that_are_evaluated(
    tmp_path: Path,
) -> None:
    async def join() -> None:
        run = Run(tmp_path, version=3)
        measuring = asyncio.create_task(run.evaluation.measure(0))
        await asyncio.sleep(0)
        assert [message.index for _, message in run.hub.take()] == [0, 1, 2]
        await run.evaluation.lost(run.fleet.generators()[0])
        run.hub.take()
        ready = fg.GeneratorReady(G, 2, 0, metrics_port=4321)
        assert await run.hear(G, ready) == [(G, tg.InstallWeights(weights(3)))]
        state = read_state(run.directory.path)
        assert state is not None
        assert state.metrics_ports == {G: 4321}
        measuring.cancel()

    asyncio.run(join())


def test_an_evaluation_counts_each_sample_once_and_only_of_its_weights(tmp_path: Path) -> None:
    async def evaluate() -> None:
        run = Run(tmp_path, version=3)
        measuring = asyncio.create_task(run.evaluation.measure(0))
        await asyncio.sleep(0)
        asked = [message for _, message in run.hub.take()]
        assert [(message.index, message.prompt.prompt_id) for message in asked] == [
            (0, "held-out-0"), (1, "held-out-1"), (2, "held-out-2"),
        ]  # fmt: skip
        old = await run.hear(G, fg.EvaluationSample(G, 0, 0, 1.0, 2))
        assert [message.index for _, message in old] == [0], "asked for again"
        for index, reward in ((0, 1.0), (1, 0.0), (2, 1.0)):
            await run.hear(G, fg.EvaluationSample(G, 0, index, reward, 3))
        assert await measuring == Accuracy(right=2, samples=3)
        late = fg.EvaluationSample(G, 0, 0, 1.0, 3)
        assert await run.hear(G, late) == [], "the round is over"

    asyncio.run(evaluate())


def test_a_stop_ends_an_evaluation_without_a_result(tmp_path: Path) -> None:
    async def stop() -> None:
        run = Run(tmp_path)
        measuring = asyncio.create_task(run.evaluation.measure(0))
        await asyncio.sleep(0)
        run.waiter.stop_requested = True
        run.waiter.notify()
        assert await measuring is None
        await run.training.run()
        assert not run.training.has_begun, "a stop before training leaves it out"

    asyncio.run(stop())
