"""A run without processes: inbox, training, watchdog and scheduler are real."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

from fake_processes import FakeProgress, run_config, started_fleet, task, weights

from asyncrl.controller.inbox import CheckpointRecord, Inbox
from asyncrl.controller.live_settings import LiveSettings
from asyncrl.controller.policy_watch import PolicyWatch
from asyncrl.controller.trainer_restarts import TrainerRestarts
from asyncrl.controller.training import Training
from asyncrl.controller.unfinished_work import SampleHandover, UnfinishedWork
from asyncrl.controller.watchdog import Watchdog
from asyncrl.evaluation.during import EvaluationDuringTraining
from asyncrl.evaluation.fleet import FleetEvaluation
from asyncrl.evaluation.results import EvaluationResults
from asyncrl.fleet.condition_wait import ConditionWait
from asyncrl.rollout.trajectory import SampleId
from asyncrl.runs.directory import RunDirectory
from asyncrl.scheduler.run_ahead import RunAhead
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import from_trainer as ft
from asyncrl.wire.messages import to_trainer as tt
from asyncrl.wire.records.step import EngineStats

G = "generator-0"
DIGEST = b"d" * 16


def step_finished(version: int) -> ft.StepFinished:
    numbers: Any = None  # nothing here reads them
    return ft.StepFinished(0, (0,), weights(version), numbers, numbers)


def expected(*samples: SampleId) -> tt.Expect:
    reported = (tt.ExpectedSample(sample, 5, 0, DIGEST) for sample in samples)
    return tt.Expect(0, G, tuple(reported))


def evaluation(run: Run, requests: SampleRequests, path: Path) -> FleetEvaluation:
    config, fleet, say = run.config, run.fleet, run.progress.say
    during = EvaluationDuringTraining(config, requests, fleet, say=say, result=say, given_up=say)
    results = EvaluationResults(path, config.evaluation)
    return FleetEvaluation(
        config.evaluation,
        requests,
        fleet=fleet,
        waiter=run.waiter,
        during=during,
        results=results,
    )


class Run:
    """A run of steps of two samples, with everything but its processes."""

    def __init__(
        self,
        path: Path,
        *,
        version: int = 0,
        steps: int = 1,
        max_restarts: int = 3,
        initial_weights: str | None = "",
        ranks: int = 1,
        slots: int = 2,
        **scheduler: object,
    ) -> None:
        sizes = {"group_size": 2, "groups_per_step": 1}
        self.config = run_config(
            run={"name": "mine", "directory": str(path), "steps": steps},
            scheduler=sizes | (scheduler or {"on_update": "keep"}),
            trainer={"ranks": ranks},
            evaluation={"prompts": 3},
            launcher={"max_restarts": max_restarts},
        )
        self.fleet, self.hub = started_fleet(self.config, version, slots=slots)
        self.progress: Any = FakeProgress()
        self.waiter = ConditionWait()
        self.requests = requests = SampleRequests(task(), seed=0)
        if initial_weights is not None:
            requests.starts_from(initial_weights)
        self.evaluation = evaluation(self, requests, path)
        self.directory = RunDirectory.create(self.config, resume=False, clean=False)
        path, say = self.directory.path, self.progress.say
        self.moves = SampleHandover(self.config, path, requests, say, self.fleet.files)
        ahead = RunAhead(shared=False, groups_per_step=self.config.scheduler.groups_per_step)
        self.training = Training(
            self.config,
            self.requests,
            self.fleet,
            self.progress,
            self.waiter,
            self.moves,
            ahead,
        )
        self.training.trained_steps = version
        controllers = self.training, self.evaluation, self.progress
        self.restarts = TrainerRestarts(
            self.config, self.directory, self.fleet, *controllers, self.waiter
        )
        self.watchdog = Watchdog(self.fleet, self.restarts, *controllers)
        self.inbox = Inbox(
            self.directory,
            self.fleet,
            *controllers,
            self.waiter,
            self.restarts,
            CheckpointRecord(path / "checkpoints", say),
            UnfinishedWork(self.config, path, self.fleet, requests, say),
            PolicyWatch(self.config.run.on_wrong_policy, self.fleet, self.progress, self.waiter),
            self.moves,
            AsyncMock(spec=LiveSettings),
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
        await self.inbox.handle(G, fg.GeneratorReport(G, stats, held=0, rewards_waiting=0))
