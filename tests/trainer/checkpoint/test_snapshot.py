"""A checkpoint holds the state of its step, whatever training does while it is written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.checkpoint import checkpoint
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.ranks.world import this_machine

GroupOf = Callable[..., list[Trajectory]]


def _learner(path: str) -> Learner:
    config = TrainerConfig(device="cpu", learning_rate=1e-2)
    return Learner(config, path, group_size=4, seed=1)


def _step(learner: Learner, group_of: GroupOf) -> None:
    rng = np.random.default_rng(learner.policy_version)
    group = group_of(0, rng, version=learner.policy_version)
    learner.add_group(group, rng.normal(size=4).astype(np.float32))
    learner.step()


def _state(learner: Learner) -> list[torch.Tensor]:
    optimizer = [
        one for state in learner._update.optimizer.state.values() for one in state.values()
    ]
    return [one.clone() for one in (*(tensor for _, tensor in learner.tensors()), *optimizer)]


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_copied_state_is_that_of_its_step(
    model_path: Callable[[str], str], group_of: GroupOf, tmp_path: Path
) -> None:
    """Also the second copy, into the same buffers."""
    learner = _learner(model_path("qwen3"))
    for version in (1, 2):
        _step(learner, group_of)
        wanted = _state(learner)
        pending = learner.pending(copied=True)
        _step(learner, group_of)
        assert not _same(wanted, _state(learner))
        learner.write(pending, tmp_path / f"step-{2 * version - 1:06d}")
        restored = _learner(model_path("qwen3"))
        restored.restore(tmp_path / f"step-{2 * version - 1:06d}")
        assert _same(wanted, _state(restored))


def test_a_step_waits_until_the_state_before_it_is_copied(
    model_path: Callable[[str], str],
    group_of: GroupOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = _learner(model_path("qwen3"))
    _step(learner, group_of)
    wanted = _state(learner)
    may_copy, copy = threading.Event(), checkpoint._copy_one

    def slowly(*arguments: Any) -> None:
        may_copy.wait(60)
        copy(*arguments)

    monkeypatch.setattr(checkpoint, "_copy_one", slowly)
    pending = learner.pending(copied=True)
    training = threading.Thread(target=_step, args=(learner, group_of))
    training.start()
    training.join(0.2)
    assert training.is_alive()
    assert _same(wanted, _state(learner)), "nothing has changed before it is copied"
    may_copy.set()
    training.join(60)
    assert learner.policy_version == 2
    learner.write(pending, tmp_path / "step-000001")
    restored = _learner(model_path("qwen3"))
    restored.restore(tmp_path / "step-000001")
    assert _same(wanted, _state(restored))


def test_without_memory_for_a_copy_it_is_written_while_training_waits(
    model_path: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    learner = _learner(model_path("qwen3"))
    monkeypatch.setattr(checkpoint, "memory_left", lambda: 1000)
    pending = learner.pending(copied=True)
    assert not pending.is_copied
    assert "bytes of memory, and 1000 are left" in caplog.text
    learner.write(pending, tmp_path / "step-000000")
    _learner(model_path("qwen3")).restore(tmp_path / "step-000000")


def test_a_failed_copy_is_told_to_training_and_to_the_writer(
    model_path: Callable[[str], str],
    group_of: GroupOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a checkpoint is written from buffers of the step before."""
    learner = _learner(model_path("qwen3"))

    def fails(*_: Any) -> None:
        raise MemoryError("no page")

    monkeypatch.setattr(checkpoint, "_copy_one", fails)
    pending = learner.pending(copied=True)
    with pytest.raises(MemoryError):
        _step(learner, group_of)
    with pytest.raises(MemoryError):
        learner.write(pending, tmp_path / "step-000000")
    assert not (tmp_path / "step-000000").exists()


def test_ranks_of_one_machine_need_its_memory_together() -> None:
    here = this_machine()
    gathered = [f"{count} {machine}".encode() for count, machine in
                [(100, here), (20, here), (7, "another")]]  # fmt: skip
    assert checkpoint._needed_here(gathered) == 120
