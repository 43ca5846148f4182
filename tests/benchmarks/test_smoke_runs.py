"""Benchmarks that make real runs go their whole way.

What only waits for a run's end gets one in threads of this process, which spares three imports of
torch; what watches, kills or attacks processes gets real ones, which are forked (`forked_runs`).
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from run_in_threads import ThreadLauncher, as_command
from smokes import IN_THREADS, ROOT, smoke

from asyncrl.config.run_config import load_config
from asyncrl.monitoring.records.trained_samples import read_trained_samples
from benchmarks import watchers
from benchmarks.live_audit import gradients

pytestmark = pytest.mark.slow


@pytest.fixture
def _runs_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of `run_command` that are waited for are carried out in this process."""
    run = subprocess.run

    def carry_out(command: Sequence[str], **options: Any) -> Any:
        if list(command[1:4]) == ["-m", "asyncrl", "run"]:
            return as_command(command)
        return run(command, **options)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("asyncrl.startup.launching.LocalLauncher", ThreadLauncher)
    monkeypatch.setattr(subprocess, "run", carry_out)


@pytest.mark.usefixtures("_forked_runs", "_runs_in_threads")
@pytest.mark.parametrize("name", IN_THREADS)
def test_with_runs_in_threads(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert smoke(name, tmp_path / "out.json", capsys)["ratios"]


@pytest.mark.usefixtures("_forked_runs")
def test_watchers_of_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    written = smoke("watchers", tmp_path / "watchers.json", capsys)
    assert written["raw"]["periods"].keys() == set(watchers.KINDS)
    for periods in written["raw"]["periods"].values():
        assert {period["watchers"] for period in periods} == {0, 2}
        assert all(period["steps"] >= 2 for period in periods)


@pytest.mark.usefixtures("_forked_runs")
def test_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A smoke installs no TRL, which is compared with."""
    assert smoke("peers", tmp_path / "out.json", capsys)["raw"]["runs"]


@pytest.mark.usefixtures("_forked_runs")
def test_an_audit_finds_a_run_right_and_a_gradient_of_other_rewards_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = smoke("live_audit", tmp_path / "out.json", capsys, "--keep", str(tmp_path / "kept"))
    found = written["raw"]["failing guesses"]
    assert found["faults"] == []
    assert 0 < found["gradients"]["weights"] < gradients.CLOSE
    run = tmp_path / "kept" / found["run"]
    config = load_config(run / "config.yaml")
    records = list(read_trained_samples(run / "samples"))
    first = [one for one in records if one.step == 0]
    first[0] = msgspec.structs.replace(first[0], reward=first[0].reward + 0.5)
    wrong = gradients.worst_differences(run, first, str(config.model.path), config)
    assert min(wrong["reward"], wrong["weights"], wrong["exp_avg"]) > gradients.CLOSE


@pytest.mark.usefixtures("_forked_runs")
def test_a_paced_run_trains_on_nothing_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = smoke("paced", tmp_path / "out.json", capsys)
    (run,) = written["raw"]["runs"]
    assert run["numbers"]["staleness_max"] == 0
    assert run["numbers"]["generator_busy"].keys() >= {"step", "install"}


@pytest.mark.usefixtures("_forked_runs")
def test_a_run_survives_generator_reward_worker_and_controller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No group is lost or trained on twice, nothing is stale, nothing is left."""
    written = smoke("chaos", tmp_path / "out.json", capsys)
    (run,) = written["raw"]["by_type"].values()
    assert [kill["victim"] for kill in run["kills"]] == ["generator", "reward", "controller"]
    # Steps may go on without the generator; without a controller they do not.
    assert run["kills"][2]["engine_start_seconds"] > 0
    assert (run["failure"], run["exit_code"]) == (None, 0)
    assert (run["groups_lost"], run["groups_twice"], run["groups_failed"]) == (0, 0, 0)
    assert run["groups_trained"] == 4 * run["steps"]
    assert run["steps_in_order"]
    assert run["staleness_max"] == 0
    assert run["leftovers"] == {"processes": 0, "sockets": 0, "shared_memory": 0}
    assert run["same_groups"]


@pytest.mark.usefixtures("_forked_runs")
def test_a_run_under_attack_trains_on_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run that is left alone has one generator instead of two, so other batches."""
    found = smoke("hostile", tmp_path / "out.json", capsys)["raw"]
    assert found["difference"] == ""
    assert (found["processes_ended"], found["status_failed"]) == (0, 0)
    assert sum(found["sent"].values()) == 2000
    assert {"unauthenticated", "unknown_peer", "malformed", "cut_off"} <= found["refused"].keys()
