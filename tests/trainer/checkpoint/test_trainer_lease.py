"""A trainer that was replaced writes nothing, also if it lives on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainer_harness import FakeTokenizer

from asyncrl.config.run_section import RunSection
from asyncrl.monitoring.metrics.metrics import TrainerMetrics, new_registry
from asyncrl.monitoring.records.trained_samples import read_trained_samples
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import Superseded
from asyncrl.trainer.checkpoint import checkpoint
from asyncrl.trainer.checkpoint.trainer_lease import FENCE_FILE, TrainerLease, raise_fence
from asyncrl.trainer.learner import Learner
from asyncrl.trainer_process.sample_log import TrainedSampleLog

ModelPath = Callable[[str], str]


def test_only_the_trainer_that_was_started_last_passes(tmp_path: Path) -> None:
    TrainerLease(tmp_path, "no file").check()
    old = TrainerLease(tmp_path, raise_fence(tmp_path))
    old.check()
    new = TrainerLease(tmp_path, raise_fence(tmp_path))
    new.check()
    TrainerLease(tmp_path, "").check()
    with pytest.raises(Superseded, match="another trainer replaced"):
        old.check()
    (tmp_path / FENCE_FILE).write_text("")
    old.check()


def test_a_folder_that_takes_no_file_fences_nobody(tmp_path: Path) -> None:
    (tmp_path / FENCE_FILE).mkdir()
    word = raise_fence(tmp_path)
    assert word == ""
    TrainerLease(tmp_path, "a word").check()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_replaced_trainer_leaves_no_checkpoint_and_touches_none(
    model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    checkpoints = tmp_path / "checkpoints"
    config = TrainerConfig(device="cpu", keep_checkpoints=1)
    learner = Learner(
        config,
        model_path("qwen3"),
        group_size=4,
        seed=1,
        fence=TrainerLease(tmp_path, raise_fence(tmp_path)),
    )
    learner.save(checkpoints / "step-000000")
    being_written = checkpoints / ".step-000001.77.writing"  # by the new trainer
    fill = checkpoint.Pending._fill

    def replaced(*arguments: Any) -> None:
        fill(*arguments)
        raise_fence(tmp_path)
        being_written.mkdir()

    if when == "before":
        raise_fence(tmp_path)
        being_written.mkdir()
    else:
        monkeypatch.setattr(checkpoint.Pending, "_fill", replaced)
    learner.step()
    with pytest.raises(Superseded):
        learner.save(checkpoints / "step-000001")
    assert sorted(path.name for path in checkpoints.iterdir()) == [
        being_written.name,
        "step-000000",
    ]


def test_a_replaced_trainer_logs_no_samples(tmp_path: Path) -> None:
    fence = TrainerLease(tmp_path, raise_fence(tmp_path))
    registry = new_registry()
    metrics = TrainerMetrics.register(registry, "trainer")
    log = TrainedSampleLog(tmp_path / "samples", FakeTokenizer(), RunSection(), metrics, fence)
    raise_fence(tmp_path)
    group: Any = type("Group", (), {"trajectories": (1, 2)})()
    log._write(3, [group])
    assert list(read_trained_samples(tmp_path / "samples")) == []
    labels = {"process": "trainer"}
    assert registry.get_sample_value("asyncrl_unlogged_samples_total", labels) == 2
