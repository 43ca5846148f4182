"""A trainer is lost and replaced: watchdog, inbox, training and scheduler, without processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from fake_processes import RUN_ID, weights
from running_training import DIGEST, G, Run, expected, step_finished
from whole_checkpoints import WEIGHTS, truncate, write_whole

from asyncrl.errors import RunFailed, UserError
from asyncrl.launch.shared_memory import weights_id
from asyncrl.monitoring.records.metrics_log import MetricsLog, read_metrics
from asyncrl.rollout.trajectory import SampleId
from asyncrl.runs.resuming import rewind
from asyncrl.scheduler.events import StopRequested
from asyncrl.tasks.sample_requests import sample_seed
from asyncrl.trainer.checkpoint.format.files import ResumePoint
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import from_trainer as ft
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.records.step import StepMetrics
from asyncrl.wire.weights.layout import SHARED_MEMORY, WeightManifest

SAMPLES = (SampleId(0, 0), SampleId(0, 1))


async def lose(run: Run, name: str = "trainer", code: int = -9) -> list[tuple[str, Any]]:
    """A trainer dies and the watchdog sees it; what is sent in turn."""
    run.hub.launcher.handles[name].code = code
    assert await run.watchdog.check()
    return run.hub.take()


async def train_step_0(run: Run) -> None:
    run.hub.take()
    for sample in SAMPLES:
        await run.hear(G, fg.SampleFinished(G, sample, 5, 0, "stop", DIGEST))
    for sample in SAMPLES:
        await run.hear(G, fg.SampleDelivered(G, sample))
    await run.hear("trainer", step_finished(1))
    await run.hear(G, fg.WeightsInstalled(G, 1))


def test_another_trainer_continues_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4)
        log = MetricsLog(run.directory.path / "metrics.jsonl")
        log.append(StepMetrics(step=0, time=1.0))
        log.close()
        checkpoints = run.directory.path / "checkpoints"
        training = await run.begin()
        await train_step_0(run)
        (damaged,) = write_whole(checkpoints, 1)
        truncate(damaged / WEIGHTS)
        write_whole(checkpoints, 0)
        assert await lose(run) == []
        spec = run.hub.launcher.handles["trainer.1"].spec
        assert (spec.resume_from, spec.lineage) == (0, 1)
        assert run.progress.said[-1] == (
            "started trainer.1 in place of trainer, from the checkpoint of step 0; steps to train "
            "again: 1"
        )
        assert await run.hear("trainer", step_finished(1)) == [], "a late message"
        discard, rewind = await run.hear("trainer.1", ft.TrainerReady(0, weights(0), None))
        assert discard == (G, tg.Discard((SampleId(1, 0), SampleId(1, 1))))
        assert rewind == (G, tg.Rewind(0, lineage=1))
        assert f"{WEIGHTS} is truncated" in run.progress.said[-2]
        assert not damaged.exists()
        assert read_metrics(run.directory.path / "metrics.jsonl") == []
        assert await run.hear("trainer", step_finished(2)) == [], "a late message"
        sent = await run.hear(G, fg.Rewound(G, 1, -1))
        assert sent == [(G, tg.InstallWeights(weights(0), lineage=1))]
        sent = await run.hear(G, fg.WeightsInstalled(G, 0))
        assert [message.sample for _, message in sent] == list(SAMPLES)
        for sample in SAMPLES:
            sent = await run.hear(G, fg.SampleFinished(G, sample, 5, 0, "stop", DIGEST))
        assert sent == [
            ("trainer.1", expected(*SAMPLES)),
            (G, tg.Deliver(0, SAMPLES, lineage=1)),
        ]
        training.cancel()

    asyncio.run(check())


def test_the_seeds_of_verification_are_new_after_a_rewind(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4, on_update="verify")
        training = await run.begin()
        await train_step_0(run)
        await run.hear(G, fg.SampleFinished(G, SampleId(1, 0), 5, 0, "stop", DIGEST))
        await lose(run)
        write_whole(run.directory.path / "checkpoints", 1)
        await run.hear("trainer.1", ft.TrainerReady(1, weights(1), None))
        sent = await run.hear(G, fg.Rewound(G, 1, 1))
        ((_, verify),) = [one for one in sent if isinstance(one[1], tg.Verify)]
        before = run.requests.verify(verify.samples, verify.min_version)
        assert (before.samples, before.min_version) == (verify.samples, verify.min_version)
        assert not set(before.seeds) & set(verify.seeds)
        training.cancel()

    asyncio.run(check())


def test_seeds_are_keyed_by_the_weights_that_the_trainer_names(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4, initial_weights=None)
        with pytest.raises(RuntimeError, match="not known yet"):
            run.requests.generate(SAMPLES[0], 0)
        await run.hear("trainer", ft.TrainerReady(0, weights(0), None, "model"))
        training = await run.begin()
        sent = [one.seed for _, one in run.hub.take() if isinstance(one, tg.Generate)]
        assert sent[:2] == [
            sample_seed(0, "model", "training", sample.group, sample.sample) for sample in SAMPLES
        ]
        await lose(run)
        with pytest.raises(RunFailed, match=r"model\.path was changed .* 'model', not 'new'"):
            await run.hear("trainer.1", ft.TrainerReady(0, weights(0), None, "new"))
        training.cancel()

    asyncio.run(check())


def test_a_trainer_that_is_lost_again_and_again_ends_the_run(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4, max_restarts=9)
        await run.begin()
        await lose(run)
        for name in ("trainer.1", "trainer.2"):
            await run.hear(name, ft.TrainerReady(0, weights(0), None))
            await lose(run, name)
        with pytest.raises(
            RunFailed, match=r"4 trainers in a row .* any of them finished a step; the la"
        ):
            await lose(run, "trainer.3")

    asyncio.run(check())


def test_progress_allows_more_tries_and_max_restarts_bounds_them(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4)  # max_restarts is 3
        training = await run.begin()
        await lose(run)
        await lose(run, "trainer.1")
        await run.hear("trainer.2", ft.TrainerReady(0, weights(0), None))
        run.training.trained_steps = 1
        await lose(run, "trainer.2")
        with pytest.raises(RunFailed, match=r"launcher.max_restarts \(3\) does not allow another"):
            await lose(run, "trainer.3")
        training.cancel()

    asyncio.run(check())


def test_trainers_that_finish_steps_are_replaced_unless_all_are_lost_at_one_step(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=400, max_restarts=1000)
        training = await run.begin()
        name = "trainer"
        for number, reached in enumerate([9, 6, 8, 7, 5, 5, 5], start=1):
            run.training.trained_steps = reached  # no checkpoint is written: each begins at 0
            await lose(run, name)
            name = f"trainer.{number}"
            await run.hear(name, ft.TrainerReady(0, weights(0), None))
        run.training.trained_steps = 5
        with pytest.raises(RunFailed, match="4 trainers in a row were lost at the same step"):
            await lose(run, name)
        training.cancel()

    asyncio.run(check())


def test_records_that_cannot_be_brought_back_do_not_end_the_run(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4, on_update="verify")
        metrics = run.directory.path / "metrics.jsonl"
        log = MetricsLog(metrics)
        log.append(StepMetrics(step=0, time=1.0))
        log.close()
        training = await run.begin()
        temporary = metrics.with_name(f".{metrics.name}.{os.getpid()}")
        temporary.mkdir()  # so it cannot be written
        await lose(run)
        sent = await run.hear("trainer.1", ft.TrainerReady(0, weights(0), None))
        assert (G, tg.Rewind(0, lineage=1)) in sent
        assert run.progress.said[-1].startswith("the records of steps after 0 could not be dropped")
        assert ("rewound", (None, 0)) in run.progress.calls
        assert [one.step for one in read_metrics(metrics)] == [0]
        temporary.rmdir()
        metrics.write_text("damaged\n")
        await lose(run, "trainer.1")
        sent = await run.hear("trainer.2", ft.TrainerReady(0, weights(0), None))
        assert (G, tg.Rewind(0, lineage=2)) in sent
        assert metrics.with_name("metrics.jsonl.damaged-1").read_text() == "damaged\n"
        training.cancel()

    asyncio.run(check())


def test_records_without_repeated_steps_are_not_written_again(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    log = MetricsLog(metrics)
    log.append(StepMetrics(step=0, time=1.0))
    log.close()
    before = metrics.stat().st_ino
    assert rewind(tmp_path, ResumePoint(step=1), groups_per_step=1) == []
    assert metrics.stat().st_ino == before


def test_the_memory_of_a_lost_trainers_weights_is_free_before_the_next_one_starts(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4)
        training = await run.begin()
        identity = weights_id(RUN_ID, "trainer")
        file = SHARED_MEMORY / f"asyncrl-{identity}-weights-0"
        file.touch()
        await lose(run)
        assert not file.exists()
        training.cancel()

    asyncio.run(check())


def test_a_trainer_whose_weights_were_removed_is_replaced(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4)
        training = await run.begin()
        run.fleet.trainer.weights = WeightManifest(1, str(tmp_path / "gone"), 0, ())
        await run.hear(G, fg.WeightsInstalled(G, 0))
        assert await run.watchdog.check()
        assert run.fleet.trainer.name == "trainer.1"
        assert f"{tmp_path}/gone were removed" in run.progress.said[0]
        training.cancel()

    asyncio.run(check())


def test_a_trainer_that_is_lost_while_training_begins_does_not_join(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4, on_update="verify")
        training = asyncio.create_task(run.training.run())
        await asyncio.sleep(0)  # it waits for reports
        await lose(run)
        await run.report()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not [one for one in run.hub.take() if isinstance(one[1], tg.Generate)]
        sent = await run.hear("trainer.1", ft.TrainerReady(0, weights(0), None))
        assert [one.sample for _, one in sent[:2]] == list(SAMPLES)
        for sample in SAMPLES:
            sent = await run.hear(G, fg.SampleFinished(G, sample, 5, 0, "stop", DIGEST))
        assert ("trainer.1", expected(*SAMPLES)) in sent
        training.cancel()

    asyncio.run(check())


def test_training_that_is_called_again_waits_for_the_step_to_end(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4)
        first = await run.begin()
        run.waiter.stop_requested = True
        again = asyncio.create_task(run.training.run())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not again.done()
        first.cancel()
        again.cancel()

    asyncio.run(check())


def test_a_trainer_that_cannot_start_ends_the_run(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4)
        run.fleet.trainer.is_ready = False
        with pytest.raises(RunFailed, match=r"^before it was ready, the trainer ended with"):
            await lose(run, code=1)
        other = Run(tmp_path / "other", steps=4)
        other.fleet.trainer.is_ready = False
        await lose(other)
        assert "trainer.1" in other.hub.launcher.handles, "killed by somebody: it may start"

    asyncio.run(check())


def test_trainers_that_leave_with_their_machine_are_replaced_again_and_again(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4, max_restarts=0)
        run.fleet.trainer.is_ready = False
        name = "trainer"
        for number, code in enumerate([143, 0, 0, 0, 0, 0], start=1):
            run.hub.launcher.handles[name].lost_with_machine = True
            await lose(run, name, code)
            name = f"trainer.{number}"
            await run.hear(name, ft.TrainerReady(0, weights(0), None))
            run.training.trained_steps = 0
        assert run.fleet.trainer.name == "trainer.6"

    asyncio.run(check())


def test_a_users_mistake_ends_the_run_although_the_trainer_is_replaced(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4)
        training = await run.begin()
        await lose(run, code=1)
        await run.hear("trainer", ft.Failure("trainer.algorithm: no such loss", user_error=True))
        with pytest.raises(UserError, match="no such loss"):
            await training

    asyncio.run(check())


def test_a_stopping_run_does_not_replace_its_trainer(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path, steps=4)
        training = await run.begin()
        run.waiter.stop_requested = True
        await run.training.apply(StopRequested())
        await lose(run)
        assert "trainer.1" not in run.hub.launcher.handles
        for _ in range(5):
            await asyncio.sleep(0)
        await run.report()
        await training
        assert not run.training.is_complete

    asyncio.run(check())


def test_steps_that_are_lost_after_the_last_one_are_trained_again(tmp_path: Path) -> None:
    async def check() -> None:
        run = Run(tmp_path)  # of one step
        await run.begin()
        await train_step_0(run)
        assert not run.training.is_running
        write_whole(run.directory.path / "checkpoints", 1)
        await lose(run)
        sent = await run.hear("trainer.1", ft.TrainerReady(1, weights(1), None))
        assert sent == [], "nothing is lost"
        assert run.training.is_complete
        assert not run.training.is_running
        truncate(run.directory.path / "checkpoints" / "step-000001" / WEIGHTS)
        write_whole(run.directory.path / "checkpoints", 0)
        measured = asyncio.create_task(run.evaluation.measure(1))
        await asyncio.sleep(0)
        await lose(run, "trainer.1")
        sent = await run.hear("trainer.2", ft.TrainerReady(0, weights(0), None))
        assert sent == [(G, tg.Rewind(0, lineage=2))]
        assert await measured is None
        assert run.training.is_running

    asyncio.run(check())
