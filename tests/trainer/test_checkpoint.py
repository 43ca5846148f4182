"""Checkpoints: whole or absent, and a resumed run is the run that was not interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.trajectory import Trajectory
from trainer import checkpoint_files
from trainer.config import TrainerConfig
from trainer.errors import CheckpointError
from trainer.learner import Learner

GroupOf = Callable[..., list[Trajectory]]
ModelPath = Callable[[str], str]


def _learner(path: str, **settings: Any) -> Learner:
    values = {
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "learning_rate_schedule": "cosine",
        "schedule_steps": 9,
        "device": "cpu",
    } | settings
    return Learner(TrainerConfig.model_validate(values), path, group_size=4, seed=1)


def _train(learner: Learner, group_of: GroupOf, steps: int) -> None:
    for _ in range(steps):
        rng = np.random.default_rng(learner.policy_version)
        for index in range(3):
            group = group_of(index, rng, version=learner.policy_version)
            learner.add_group(group, rng.normal(size=4).astype(np.float32))
        learner.step()


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_resumed_run_is_the_uninterrupted_one(
    name: str,
    model_path: ModelPath,
    group_of: GroupOf,
    tmp_path: Path,
    tokenizer_kept: Callable[[Path], bool],
) -> None:
    whole = _learner(model_path(name))
    _train(whole, group_of, 4)
    first = _learner(model_path(name))
    _train(first, group_of, 2)
    first.add_group(group_of(9, np.random.default_rng(0)), np.arange(4, dtype=np.float32))
    first.save(tmp_path / "step-000002")
    state = torch.get_rng_state()
    second = _learner(model_path(name), threads=1)
    torch.manual_seed(99)
    second.restore(checkpoint_files.latest(tmp_path) or Path())
    assert second.policy_version == 2
    assert torch.equal(torch.get_rng_state(), state)
    _train(second, group_of, 2)
    for (left, a), (right, b) in zip(whole.tensors(), second.tensors(), strict=True):
        assert left == right
        assert torch.equal(a, b), left
    model = tmp_path / "step-000002" / "model"
    assert tokenizer_kept(model)
    plain = AutoModelForCausalLM.from_pretrained(model)
    assert plain.config._attn_implementation != "asyncrl_packed"


def test_the_newest_complete_one_is_found_and_the_rest_pruned(
    model_path: ModelPath, group_of: GroupOf, tmp_path: Path
) -> None:
    learner = _learner(model_path("qwen3"), keep_checkpoints=2)
    assert checkpoint_files.latest(tmp_path / "absent") is None
    for version in (0, 1, 2):
        learner.save(tmp_path / f"step-{version:06d}")
        learner.step()
    (tmp_path / "step-000007").mkdir()  # no state.json: not complete
    (tmp_path / "notes").mkdir()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["notes", "step-000001", "step-000002", "step-000007"]
    assert checkpoint_files.latest(tmp_path) == tmp_path / "step-000002"
    learner.save(tmp_path / "step-000002")  # again, over itself
    assert json.loads((tmp_path / "step-000002" / "state.json").read_text())["policy_version"] == 3


def test_nothing_half_written_stays(
    model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = _learner(model_path("qwen3"))
    learner.save(tmp_path / "step-000000")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    for name in ("step-000000", "step-000001"):
        with pytest.raises(CheckpointError, match="No space"):
            learner.save(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000"]
    assert (tmp_path / "step-000000" / "trainer.pt").exists()


def test_what_a_killed_writer_left_is_removed(model_path: ModelPath, tmp_path: Path) -> None:
    (tmp_path / ".step-000003.77.writing").mkdir()
    _learner(model_path("qwen3")).save(tmp_path / "step-000004")
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004"]


def test_other_runs_and_broken_files_are_refused(model_path: ModelPath, tmp_path: Path) -> None:
    path = tmp_path / "step-000000"
    _learner(model_path("qwen3")).save(path)
    with pytest.raises(CheckpointError, match=r"loss_normalization: "):
        _learner(model_path("qwen3"), loss_normalization="sequence").restore(path)
    with pytest.raises(CheckpointError, match="another model"):
        _learner(model_path("llama")).restore(path)
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        _learner(model_path("qwen3")).restore(tmp_path)
    (path / "trainer.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match="cannot read"):
        _learner(model_path("qwen3")).restore(path)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        _learner(model_path("qwen3")).restore(path)
