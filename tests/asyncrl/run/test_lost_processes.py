"""A process that counts as lost and lives on, as on a node that is cut off, changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_processes import weights
from running_training import DIGEST, G, Run, step_finished

from asyncrl.errors import RunFailed
from asyncrl.rollout.trajectory import SampleId
from asyncrl.runs.directory import read_state
from asyncrl.trainer.checkpoint.trainer_lease import FENCE_FILE
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import from_trainer as ft
from asyncrl.wire.messages.to_trainer import Withdraw
from asyncrl.wire.records.step import EngineStats
from asyncrl.wire.weights.layout import Fingerprint

OURS = SampleId(0, 0)
OF_GENERATORS = [
    fg.GeneratorReady(G, 2, 0, Fingerprint({}, ""), metrics_port=4321),
    fg.SampleFinished(G, OURS, 5, 0, "stop", DIGEST),
    fg.SampleFailed(G, OURS, "bad", user_error=True),
    fg.EvaluationSample(G, 0, 0, 1.0, 0),
    fg.WeightsInstalled(G, 0),
    fg.Rewound(G, 1, 0),
    fg.GeneratorReport(G, EngineStats(kv_used=0.25), held=0, rewards_waiting=0),
]
OF_TRAINERS = [
    ft.TrainerReady(0, weights(0), 4322),
    ft.CheckpointWritten(1, "step-1"),
    ft.DeliveryRefused("generator-0.1", OURS, "bad"),
    ft.PeerCutOff("generator-0.1", "bad"),
]


def state_of(run: Run) -> tuple[Any, ...]:
    ports = read_state(run.directory.path)
    scheduler = run.training._scheduler
    snapshot = None if scheduler is None else repr(scheduler.snapshot())
    return ports and ports.metrics_ports, snapshot, run.waiter.stop_requested, run.progress.said[:]


@pytest.mark.parametrize("message", OF_GENERATORS, ids=lambda one: type(one).__name__)
def test_a_lost_generator_gets_no_work_and_does_none(tmp_path: Path, message: Any) -> None:
    async def check() -> None:
        run = Run(tmp_path, on_update="keep")
        training = await run.begin()
        measuring = asyncio.create_task(run.evaluation.measure(0))
        await asyncio.sleep(0)
        run.hub.launcher.handles[G].code = -9
        assert await run.watchdog.check()
        assert G not in [one.name for one in run.fleet.generators()]
        run.hub.launcher.handles[G].code = None  # it was only cut off
        run.hub.take()
        before = state_of(run)
        assert await run.hear(G, message) == []
        assert state_of(run) == before
        assert G not in [one.name for one in run.fleet.generators()]
        for task in (training, measuring):
            task.cancel()

    asyncio.run(check())


@pytest.mark.parametrize("message", OF_TRAINERS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("replacement_is_ready", [False, True])
def test_a_lost_trainer_refuses_nothing_and_joins_no_more(
    tmp_path: Path, message: Any, replacement_is_ready: bool
) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4, on_update="verify")
        training = await run.begin()
        run.hub.launcher.handles["trainer"].code = -9
        run.hub.launcher.handles[G].code = -9
        assert await run.watchdog.check()
        run.hub.launcher.handles["trainer"].code = None
        (replacement,) = [one for one in run.fleet.every_generator if not one.is_gone]
        ready = fg.GeneratorReady(replacement.name, 2, 0, Fingerprint({}, ""), metrics_port=4321)
        await run.hear(replacement.name, ready)
        if replacement_is_ready:
            await run.hear("trainer.1", ft.TrainerReady(0, weights(0), 4323))
        run.hub.take()
        before = state_of(run)
        name = replacement.name
        if isinstance(message, ft.PeerCutOff | ft.DeliveryRefused):
            message_ = type(message)(name, *list_of(message)[1:])
        else:
            message_ = message
        assert await run.hear("trainer", message_) == []
        assert state_of(run) == before
        assert run.hub.launcher.handles[name].code is None, "it is not cut off"
        training.cancel()

    asyncio.run(check())


def list_of(message: Any) -> list[Any]:
    return [getattr(message, name) for name in message.__struct_fields__]


def test_what_a_lost_process_had_done_still_counts(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, on_update="keep")
        training = await run.begin()
        for sample in (OURS, SampleId(0, 1)):
            await run.hear(G, fg.SampleFinished(G, sample, 5, 0, "stop", DIGEST))
        run.hub.launcher.handles[G].code = -9
        assert await run.watchdog.check()
        for sample in (OURS, SampleId(0, 1)):
            await run.hear(G, fg.SampleDelivered(G, sample))
        await run.hear("trainer", step_finished(1))
        assert run.training.is_complete
        training.cancel()

    asyncio.run(check())


def test_orders_of_a_lost_generator_are_withdrawn_before_others_are_given(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, on_update="keep", max_restarts=1)
        training = await run.begin()
        run.hub.take()
        run.hub.launcher.handles[G].code = -9
        assert await run.watchdog.check()
        assert ("trainer", Withdraw(G)) in run.hub.take()
        run.hub.launcher.handles["trainer"].code = run.hub.launcher.handles[f"{G}.1"].code = -9
        with pytest.raises(RunFailed):  # its replacement is told of no orders but its own
            await run.watchdog.check()
        assert run.hub.take() == []
        training.cancel()

    asyncio.run(check())


def test_each_trainer_is_told_the_word_in_the_runs_folder(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4)
        training = await run.begin()
        words = []
        for name in ("trainer", "trainer.1"):
            run.hub.launcher.handles[name].code = -9
            assert await run.watchdog.check()
            words.append(run.fleet.trainer.spec.fence)
            assert words[-1] == (run.directory.path / FENCE_FILE).read_text()
            await run.hear(run.fleet.trainer.name, ft.TrainerReady(0, weights(0), None))
        assert len(set(words)) == 2
        training.cancel()

    asyncio.run(check())
