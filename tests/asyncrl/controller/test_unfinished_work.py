"""The controller has run-ahead saved with a checkpoint, and finds it again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_processes import FakeProgress, run_config, started_fleet, task
from running_training import Run

from asyncrl.controller.unfinished_work import UnfinishedWork
from asyncrl.rollout.trajectory import KeptTokens, SampleId
from asyncrl.runs.resuming import remove_unfinished, unfinished_folder
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.wire.messages import from_trainer as ft
from asyncrl.wire.messages.to_generator import SaveUnfinished
from asyncrl.wire.messages.unfinished_samples import UnfinishedSample, write_unfinished

KEPT = KeptTokens(
    np.array([3, 4], np.int32),
    np.array([-1, -2], np.float32),
    np.array([[3], [4]], np.int32),
    np.array([[-1], [-2]], np.float32),
    np.array([17, 17], np.uint64),
)
SAMPLES = [SampleId(9, 0), SampleId(9, 1)]


def requests_of(start: int = 0) -> SampleRequests:
    requests = SampleRequests(task(), 0, start)
    requests.starts_from("model")
    return requests


class Parts:
    """Run-ahead of a run in this folder, and what it is connected to."""

    def __init__(self, path: Path, *, start: int = 0, **sections: Any) -> None:
        scheduler = {"groups_per_step": 2, "on_update": "verify"}
        config = run_config(**{"scheduler": scheduler, **sections})
        fleet, self.hub = started_fleet(config)
        self.requests = requests_of(start)
        self.progress = FakeProgress()
        self.work = UnfinishedWork(config, path, fleet, self.requests, self.progress.say)

    def saved(self, version: int, published: int) -> list[SaveUnfinished]:
        asyncio.run(self.work.save(version, published=published))
        return [message for _, message in self.hub.take()]

    def write(self, version: int) -> Path:
        """What generator-0 writes when it is told to."""
        command = self.saved(version, version)[0]
        samples = [UnfinishedSample.of(one, "p", KEPT) for one in SAMPLES]
        write_unfinished(Path(command.file), version, command.settings, samples)
        return Path(command.file)

    def restore(self, version: int) -> list[str]:
        asyncio.run(self.work.restore(version))
        return self.progress.said


@pytest.mark.parametrize(("k", "first_group"), [(0, 14), (2, 18)])
def test_only_samples_that_no_delivery_could_have_left_out_are_saved(
    tmp_path: Path, k: int, first_group: int
) -> None:
    scheduler = {"groups_per_step": 2, "on_update": "verify", "max_off_policy_steps": k}
    (command,) = Parts(tmp_path, scheduler=scheduler).saved(4, published=6)
    assert command.first_group == first_group
    assert command.file == str(tmp_path / "unfinished" / "step-000004" / "generator-0.bin")
    assert command.policy_version == 4


def test_modes_that_cannot_verify_save_and_restore_nothing(tmp_path: Path) -> None:
    Parts(tmp_path).write(4)
    parts = Parts(tmp_path, scheduler={"on_update": "keep"})
    assert not parts.saved(4, 4)
    assert not parts.restore(4)


def test_a_restored_sample_gets_a_seed_of_this_start_the_first_time_only(tmp_path: Path) -> None:
    file = Parts(tmp_path).write(4)
    seeds = set()
    for start in (11, 12):
        parts = Parts(tmp_path, start=start)
        assert parts.restore(4) == [f"unfinished samples to continue: 2, from {file.parent}"]
        for sample in SAMPLES:
            first, second = parts.requests.generate(sample, 1), parts.requests.generate(sample, 1)
            assert first.unfinished is not None
            assert first.unfinished.place.sample == sample
            assert second.unfinished is None, "the tokens are lost with their generator"
            assert first.seed == second.seed == requests_of().generate(sample, 0).seed
            seeds |= {first.seed, first.unfinished.seed}
        # The tokens may have been verified, or drawn, under the same version before.
        seeds |= set(parts.requests.verify(SAMPLES, 5).seeds)
    seeds |= set(requests_of().verify(SAMPLES, 5).seeds)
    assert len(seeds) == len(SAMPLES) * (1 + 2 * 2 + 1)


def test_a_file_that_is_damaged_or_of_other_settings_is_refused_as_a_whole(tmp_path: Path) -> None:
    file = Parts(tmp_path).write(4)
    parts = Parts(tmp_path, sampling={"temperature": 0.5})
    (said,) = parts.restore(4)
    assert "was written with other sampling settings; its samples are generated again" in said
    unfinished_folder(tmp_path, 4).rename(unfinished_folder(tmp_path, 5))
    (said,) = Parts(tmp_path).restore(5)
    assert "belongs to step 4, not 5" in said
    file = unfinished_folder(tmp_path, 5) / file.name
    file.write_bytes(file.read_bytes()[:-1])
    parts = Parts(tmp_path)
    (said,) = parts.restore(5)
    assert "is damaged" in said
    assert parts.requests.generate(SAMPLES[0], 1).unfinished is None
    assert not Parts(tmp_path).restore(6), "no file is nothing to tell"


def test_tokens_of_another_limit_of_turns_are_not_continued(tmp_path: Path) -> None:
    """A shorter turn was cut, and a longer one would have been: verification sees neither."""
    limits: list[dict[str, Any]] = [{}, {"max_turn_tokens": 9}, {"max_turn_tokens": 8}]
    for one in limits:
        Parts(tmp_path, environment={"name": "guessing", **one}).write(4)
        said = [
            Parts(tmp_path, environment={"name": "guessing", **two}).restore(4) for two in limits
        ]
        continued = ["unfinished samples to continue: 2" in line for (line,) in said]
        assert continued == [one == two for two in limits]


def test_tokens_of_lenient_reuse_do_not_enter_a_run_without_it(tmp_path: Path) -> None:
    """They do not follow the distributions stored with them, so verification is not exact."""
    lenient: dict[str, Any] = {"cache": {"reuse": "lenient"}}
    Parts(tmp_path, **lenient).write(4)
    (said,) = Parts(tmp_path).restore(4)
    assert "was written with other sampling settings; its samples are generated again" in said
    (said,) = Parts(tmp_path, **lenient).restore(4)
    assert "unfinished samples to continue: 2" in said


def test_files_go_with_their_checkpoints(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    for version in (2, 4):
        (tmp_path / "checkpoints" / f"step-{version:06d}").mkdir(parents=True)
        parts.write(version)
    (tmp_path / "checkpoints" / "step-000002").rmdir()
    parts.saved(6, 6)
    assert [one.name for one in (tmp_path / "unfinished").iterdir()] == ["step-000004"]
    parts.saved(4, 4)
    assert not list((tmp_path / "unfinished").iterdir()), "files of an earlier trainer's step 4"
    parts.write(4)
    remove_unfinished(tmp_path, unless=lambda step: step <= 3)
    assert not list((tmp_path / "unfinished").iterdir())


def test_a_written_checkpoint_has_the_run_ahead_saved(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = Run(tmp_path, steps=9, on_update="verify")
        message = ft.CheckpointWritten(0, "checkpoints/step-000000")
        assert not await run.hear("trainer", message), "before training nothing is ahead"
        training = await run.begin()
        run.hub.take()
        ((name, sent),) = await run.hear("trainer", message)
        assert name == "generator-0"
        assert isinstance(sent, SaveUnfinished)
        training.cancel()

    asyncio.run(scenario())
