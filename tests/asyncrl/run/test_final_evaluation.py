"""A trainer is lost while the final weights are evaluated, also in a resumed, complete run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_processes import task, weights
from running_training import G, Run
from whole_checkpoints import write_whole

from asyncrl.controller.controller import Controller
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import from_trainer as ft
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.records.step import EngineStats


def the_controller_of(run: Run) -> Controller:
    controller = Controller(
        run.config,
        task(),
        directory=run.directory,
        fleet=run.fleet,
        hub=run.hub,  # type: ignore[arg-type]
        progress=run.progress,
    )
    controller._training.trained_steps = run.training.trained_steps
    return controller


async def turns() -> None:
    """Let every task do what it can."""
    for _ in range(9):
        await asyncio.sleep(0)


def test_final_weights_are_sent_when_a_lost_trainer_has_been_replaced(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path)  # of one step, and resumed after it: there is no scheduler
        run.training.trained_steps = 1
        run.fleet.trainer.is_gone = True
        controller = the_controller_of(run)
        evaluation = asyncio.create_task(controller._evaluate_after())
        await asyncio.sleep(0)
        assert run.hub.take() == []
        run.fleet.trainer.is_gone = False
        run.fleet.trainer.weights = weights(1)
        controller._waiter.notify()
        for _ in range(5):
            await asyncio.sleep(0)
        assert run.hub.take() == [(G, tg.InstallWeights(weights(1)))]
        evaluation.cancel()
        await run.evaluation.bring_to(1)
        run.hub.take()
        run.hub.launcher.handles["trainer"].code = -9
        await run.watchdog.check()
        run.hub.take()
        sent = await run.hear("trainer.1", ft.TrainerReady(1, weights(1), None))
        assert sent == [(G, tg.InstallWeights(weights(1), lineage=1))]

    asyncio.run(check())


@pytest.mark.parametrize(("at_start", "version"), [(False, 0), (True, 1), (True, 0)])
def test_the_model_before_training_is_evaluated_once_and_not_if_that_is_not_wanted(
    tmp_path: Path, at_start: bool, version: int
) -> None:
    """A run that begins without it does not measure a later model in its place when resumed."""

    async def check() -> None:
        run = Run(tmp_path, version=version, steps=4)
        evaluation = run.config.evaluation.model_copy(update={"at_start": at_start})
        run.config = run.config.model_copy(update={"evaluation": evaluation})
        controller = the_controller_of(run)
        before = asyncio.create_task(controller._evaluate_before())
        await turns()
        if at_start and not version:
            assert [type(message) for _, message in run.hub.take()] == [tg.Evaluate] * 3
            before.cancel()
        else:
            assert run.hub.take() == []
            assert await before is None

    asyncio.run(check())


@pytest.mark.parametrize("version", [4, 3])
def test_a_resumed_run_that_was_complete_trains_the_steps_that_its_trainer_lost(
    tmp_path: Path, version: int
) -> None:
    """It has no scheduler yet. Its generator has the final weights, or waits for them."""

    async def check() -> None:
        run = Run(tmp_path, version=4, steps=4)
        run.fleet.generators()[0].policy_version = version
        run.directory.state.accuracy_before, run.directory.state.evaluation_samples = 0.5, 3
        controller = the_controller_of(run)
        running = asyncio.create_task(controller._train_and_evaluate())
        await turns()
        expected_work = [tg.Evaluate] * 3 if version == 4 else [tg.InstallWeights]
        assert [type(one) for _, one in run.hub.take()] == expected_work
        write_whole(run.directory.path / "checkpoints", 2)
        run.hub.launcher.handles["trainer"].code = -9
        await controller._watchdog.check()
        await controller._inbox.handle("trainer.1", ft.TrainerReady(2, weights(2), None))
        await turns()
        assert run.hub.take()[-1] == (G, tg.Rewind(2, lineage=1))
        await controller._inbox.handle(G, fg.Rewound(G, 1, -1))
        await turns()
        stats = EngineStats(kv_used=0.25)
        await controller._inbox.handle(G, fg.GeneratorReport(G, stats, 0, 0, 0))
        await turns()
        assert run.hub.take() == [(G, tg.InstallWeights(weights(2), lineage=1))]
        await controller._inbox.handle(G, fg.WeightsInstalled(G, 2))
        assert [one.sample for _, one in run.hub.take()] == [SampleId(2, 0), SampleId(2, 1)]
        assert not running.done()
        assert any("steps to train again: 2" in one for one in run.progress.said)
        running.cancel()

    asyncio.run(check())
