"""Checkpoints: whole or absent, and a resumed run is the run that was not interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from whole_checkpoints import TRAINING, WEIGHTS, truncate

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.checkpoint import checkpoint
from asyncrl.trainer.checkpoint.export import export
from asyncrl.trainer.checkpoint.format import files as checkpoint_files
from asyncrl.trainer.checkpoint.format.manifest import read_manifest, write_manifest
from asyncrl.trainer.learner import Learner

pytestmark = pytest.mark.usefixtures("_checked_once")

INDEX = "state/index.json"
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


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("qwen3", {}, id="qwen3"),
        pytest.param("llama", {"optimizer_state": "bfloat16"}, id="llama, small moments"),
        pytest.param("llama", {"optimizer_state": "int8"}, id="llama, coded moments"),
        pytest.param(
            "qwen3",
            {"algorithm": "ppo", "ppo_epochs": 2, "kl_coefficient": 0.1, "reference_decay": 0.9},
            id="critic, moving reference",
        ),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    name: str,
    settings: dict[str, Any],
    model_path: ModelPath,
    group_of: GroupOf,
    tmp_path: Path,
    tokenizer_kept: Callable[[Path], bool],
) -> None:
    whole = _learner(model_path(name), **settings)
    _train(whole, group_of, 4)
    first = _learner(model_path(name), **settings)
    _train(first, group_of, 2)
    first.add_group(group_of(9, np.random.default_rng(0)), np.arange(4, dtype=np.float32))
    first.save(tmp_path / "step-000002")
    state = torch.get_rng_state()
    second = _learner(model_path(name), weight_decay=0.5, **settings)
    torch.manual_seed(99)
    second.restore(checkpoint_files.choose(tmp_path).directory or Path())
    assert second.policy_version == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert second._update.optimizer.param_groups[0]["weight_decay"] == 0.5, "as configured now"
    for one in second._state.optimizers.values():
        one.param_groups[0]["weight_decay"] = whole._config.weight_decay
    _train(second, group_of, 2)
    found = second._state.boxes(0)
    for name, box in whole._state.boxes(0).items():
        assert torch.equal(box.local, found.pop(name).local), name
    assert not found
    export(tmp_path / "step-000002", tmp_path / "exported")
    assert tokenizer_kept(tmp_path / "exported")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert plain.config._attn_implementation != "asyncrl_packed"


def test_the_newest_are_kept_and_one_of_the_same_name_is_set_aside(
    model_path: ModelPath, tmp_path: Path
) -> None:
    learner = _learner(model_path("qwen3"), keep_checkpoints=2)
    (tmp_path / ".step-000003.77.writing").mkdir()  # of a killed writer
    for version in (0, 1, 2):
        learner.save(tmp_path / f"step-{version:06d}")
        learner.step()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002"]
    other = _learner(model_path("qwen3"))
    other.step()
    other.step()
    other.save(tmp_path / "step-000002")
    assert (tmp_path / "set-aside" / "after-000001" / "step-000002" / "manifest.json").exists()
    assert checkpoint_files.choose(tmp_path).step == 2


def test_nothing_half_written_stays(
    model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = _learner(model_path("qwen3"))
    learner.save(tmp_path / "step-000000")
    learner.step()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_manifest", full)
    with pytest.raises(CheckpointError, match="No space"):
        learner.save(tmp_path / "step-000001")
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000"]
    assert checkpoint_files.choose(tmp_path).step == 0


def test_other_runs_and_broken_files_are_refused(model_path: ModelPath, tmp_path: Path) -> None:
    path = tmp_path / "step-000000"
    _learner(model_path("qwen3")).save(path)
    ranks = {"ranks": 4, "rank_network": "eth0", "rank_seconds": 60}  # any number may continue it
    with pytest.raises(CheckpointError, match=r"settings \(loss_normalization: [^,]*\); resume"):
        _learner(model_path("qwen3"), loss_normalization="sequence", **ranks).restore(path)
    with pytest.raises(CheckpointError, match="another model"):
        _learner(model_path("llama")).restore(path)
    with pytest.raises(CheckpointError, match="it is incomplete"):
        _learner(model_path("qwen3")).restore(tmp_path)


def test_a_resumed_run_keeps_the_digest_of_the_weights_that_it_started_from(
    model_path: ModelPath, group_of: GroupOf, tmp_path: Path
) -> None:
    first, path = _learner(model_path("qwen3")), tmp_path / "step-000001"
    start = first.initial_weights
    assert start == _learner(model_path("qwen3")).initial_weights
    _train(first, group_of, 1)
    assert first.initial_weights == start
    first.save(path)
    resumed = _learner(model_path("qwen3"))
    resumed.restore(path)
    _train(resumed, group_of, 1)
    resumed.save(tmp_path / "step-000002")
    assert read_manifest(tmp_path / "step-000002").initial_weights == start
    export(path, tmp_path / "exported")
    another_run = _learner(str(tmp_path / "exported"))
    assert another_run.initial_weights not in (start, _learner(model_path("llama")).initial_weights)


def test_a_change_that_rounding_hides_from_engines_is_another_start(
    model_path: ModelPath, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path("qwen3"), dtype=torch.float32)
    with torch.no_grad():
        weight = model.lm_head.weight
        weight[3, 3] = torch.nextafter(weight[3, 3], torch.tensor(9.0))
    model.save_pretrained(tmp_path)
    changed, unchanged = _learner(str(tmp_path)), _learner(model_path("qwen3"))
    bfloat16 = torch.bfloat16
    assert changed.fingerprint(bfloat16) == unchanged.fingerprint(bfloat16)
    assert changed.initial_weights != unchanged.initial_weights


def test_a_checkpoint_from_before_that_digest_was_recorded_can_be_resumed(
    model_path: ModelPath, tmp_path: Path
) -> None:
    path = tmp_path / "step-000000"
    _learner(model_path("qwen3")).save(path)
    _complete_again(path)
    assert b"initial_weights" not in (path / "manifest.json").read_bytes()
    resumed = _learner(model_path("qwen3"))
    resumed.restore(path)
    assert resumed.initial_weights == ""


def _complete_again(path: Path) -> None:
    """Write the manifest anew, so that only the loader can find what is wrong."""
    settings = read_manifest(path).settings
    (path / "manifest.json").unlink()
    write_manifest(path, policy_version=0, settings=settings)


BROKEN: dict[str, Callable[[Path], object]] = {
    "truncated weights": lambda at: truncate(at / WEIGHTS),
    "empty weights": lambda at: (at / WEIGHTS).write_bytes(b""),
    "no weights": lambda at: (at / WEIGHTS).unlink(),
    "truncated optimizer": lambda at: truncate(at / TRAINING),
    "no optimizer": lambda at: (at / TRAINING).unlink(),
    "empty state": lambda at: (at / INDEX).write_bytes(b""),
    "state without a key": lambda at: (at / INDEX).write_text("{}"),
    "state of another shape": lambda at: (at / INDEX).write_text("[1]"),
    "state of another optimizer": lambda at: (at / INDEX).write_text(
        (at / INDEX).read_text().replace('"states":{}', '"states":{"critic":{"x":{}}}')
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_files_that_cannot_be_loaded_are_refused_with_or_without_a_true_digest(
    kind: str, model_path: ModelPath, tmp_path: Path
) -> None:
    path = tmp_path / "step-000000"
    learner = _learner(model_path("qwen3"))
    learner.save(path)
    BROKEN[kind](path)
    with pytest.raises(CheckpointError, match=r"truncated|missing|damaged"):
        learner.restore(path)
    _complete_again(path)
    with pytest.raises(CheckpointError, match=f"{path}"):
        learner.restore(path)


class _Payload:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._mark,)


def test_a_hostile_pickle_is_refused_in_our_words_and_never_run(
    model_path: ModelPath, tmp_path: Path
) -> None:
    """Torch's own error advises `weights_only=False`, which would run it."""
    path, mark = tmp_path / "step-000000", tmp_path / "it-ran"
    learner = _learner(model_path("qwen3"))
    learner.save(path)
    (path / WEIGHTS).unlink()
    torch.save(_Payload(mark), path / WEIGHTS)
    _complete_again(path)
    with pytest.raises(CheckpointError) as caught:
        learner.restore(path)
    assert "weights_only" not in str(caught.value)
    (path / "manifest.json").unlink()
    torch.save(_Payload(mark), path / "trainer.pt")
    (path / "state.json").write_text('{"format": 1, "policy_version": 0, "setting": {}}')
    with pytest.raises(CheckpointError, match=r"format 1, but this version reads only format 3"):
        learner.restore(path)
    assert not mark.exists()
