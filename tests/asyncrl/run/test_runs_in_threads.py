"""Whole runs with the trainer and generators in threads of this process (`run_in_threads`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from asyncrl_runs import ROOT, worst_mismatch
from run_in_threads import ThreadedRun, ThreadLauncher
from small_disks import small_disk

from asyncrl.errors import RunFailed, UserError, WrongPolicyError
from asyncrl.processes.generator.generation import SampleGenerator
from engine.protocol import SamplingParams
from engine.torch.weights import ModuleWeights
from wire.records import RunResult

pytestmark = pytest.mark.slow

KEEP: dict[str, object] = {"on_update": "keep", "max_off_policy_steps": 1}
VERIFY_ONE: dict[str, object] = {"on_update": "verify", "max_off_policy_steps": 1}


@pytest.fixture
def threaded_run(
    tmp_path: Path, own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ThreadedRun]:
    """A run in threads. None of them may be alive when the test ends."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("asyncrl.run.launching.LocalLauncher", ThreadLauncher)
    before = set(threading.enumerate())
    yield ThreadedRun(tmp_path / "runs", own_model)
    roles = ("trainer", "generator")
    left = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [name for name in left if name.startswith(roles)]


@pytest.mark.parametrize(
    ("settings", "staleness"),
    [
        ({"on_update": "keep"}, 0),
        (KEEP, 1),
        ({"on_update": "recompute", "max_off_policy_steps": 1}, 1),
        ({"on_update": "keep", "max_off_policy_steps": 1, "partial_rollout": False}, 1),
        (VERIFY_ONE, 1),
    ],
    ids=["sync", "keep", "recompute", "whole answers", "verify, k = 1"],
)
def test_every_mode_keeps_its_bound_and_uses_it(
    threaded_run: ThreadedRun, settings: dict[str, object], staleness: int
) -> None:
    sets = {f"scheduler__{key}": value for key, value in settings.items()}
    result = threaded_run.run(**sets, run__steps=5)
    assert result.staleness.max == staleness
    assert result.exactly_on_policy == (staleness == 0)
    if settings in (KEEP, VERIFY_ONE):
        return  # tokens of new weights on KV computed by old ones match no policy
    fresh = [step.mismatch.fresh_abs_mean for step in threaded_run.metrics()]
    assert any(value is not None for value in fresh)
    assert max(value or 0.0 for value in fresh) < 1e-4, "engine and trainer disagree"


def test_verified_work_is_exactly_of_the_policy_that_trains_on_it(
    threaded_run: ThreadedRun,
) -> None:
    """Tokens of the previous version, once verified, have the trainer's own probabilities."""
    threaded_run.run(
        scheduler__on_update="verify", scheduler__max_off_policy_steps=0, run__steps=8,
        trainer__learning_rate=3e-3,
    )  # fmt: skip
    steps = threaded_run.metrics()
    assert [step.staleness.max for step in steps] == [0] * 8
    assert worst_mismatch(steps) < 1e-3
    assert steps[-1].tokens.verified > 0, "nothing was generated ahead"
    assert steps[-1].tokens.rejected > 0, "the policy hardly moved, so nothing was rejected"


def test_a_generator_at_another_temperature_ends_the_run_before_its_step(
    threaded_run: ThreadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Warmer(SampleGenerator):
        def __init__(
            self, engine: Any, rewards: Any, sampling: SamplingParams, **more: Any
        ) -> None:
            super().__init__(engine, rewards, replace(sampling, temperature=1.25), **more)

    monkeypatch.setattr("asyncrl.processes.generator.setup.SampleGenerator", Warmer)
    with pytest.raises(WrongPolicyError, match=r"temperature 1\.25 instead of 1") as ended:
        threaded_run.run()
    assert ended.value.exit_code == 1
    result = msgspec.json.decode((threaded_run.folder / "result.json").read_bytes(), type=RunResult)
    assert (result.steps, result.accuracy_before is not None) == (0, True)
    assert "generator-0" in result.wrong_policy[0]
    assert threaded_run.metrics() == [], "no step was trained"
    for text in (threaded_run.said(), (threaded_run.folder / "report.html").read_text()):
        assert "temperature 1.25 instead of 1" in text
    assert json.loads((threaded_run.folder / "run.json").read_text())["ended"] == "failed"


def test_a_run_that_is_to_warn_continues_with_weights_that_are_not_installed(
    threaded_run: ThreadedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModuleWeights, "install", lambda _self, _version: None)
    result = threaded_run.run(run__on_wrong_policy="warn")
    assert result.steps == 3
    assert not result.exactly_on_policy
    assert "generator-0 decodes with other weights" in result.wrong_policy[0]
    steps = threaded_run.metrics()
    assert steps[0].exactly_on_policy
    assert not steps[-1].exactly_on_policy
    assert "They still have the numbers of version 0: they were not" in steps[1].wrong_policy[0]
    assert "so the run is not on-policy" in (threaded_run.folder / "report.html").read_text()


def test_a_run_on_a_disk_that_takes_no_checkpoint_trains_to_its_end_and_says_so(
    threaded_run: ThreadedRun, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "900k") as disk:
        threaded_run.runs = disk.path
        lost = "the last state of the run, after step 3, is not saved"
        with pytest.raises(RunFailed, match=lost) as failed:
            threaded_run.run(trainer__checkpoint_every=1)
        assert failed.value.exit_code == 1
        said = threaded_run.said()
        assert "step-000001 cannot be written: No space left on device (" in said
        assert said.count("Training continues") == 1
        result = (threaded_run.folder / "result.json").read_bytes()
        assert msgspec.json.decode(result, type=RunResult).steps == 3
        assert [step.step for step in threaded_run.metrics()] == [0, 1, 2]
        assert json.loads((threaded_run.folder / "run.json").read_text())["ended"] == "failed"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise KeyError('colour')", "KeyError"),
        ("while True: pass", "rewards.timeout_seconds"),
    ],
)
def test_a_reward_that_fails(
    threaded_run: ThreadedRun, tmp_path: Path, body: str, expected: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def score(prompt, response, example):\n    {body}\n")
    with pytest.raises(UserError) as refused:
        threaded_run.run(
            rewards__functions=f"[{{name: '{file}:score'}}]", rewards__timeout_seconds=2
        )
    assert refused.value.exit_code == 2
    assert "mine.py:score" in str(refused.value)
    assert expected in str(refused.value)
    assert not threaded_run.folder.exists()
