"""The fit to the records of real runs, and simulations with it, compared with the measurements."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli.app import app
from asyncrl.errors import UserError
from asyncrl.simulation.fit import fit_run
from asyncrl.simulation.lengths import Survival
from asyncrl.simulation.study import cluster

RECORDED = Path(__file__).parent / "recorded"
"""Three real runs that differ in the settings of the scheduler; see its README."""


@functools.cache
def recorded(name):
    return fit_run(RECORDED / name)


@pytest.mark.parametrize("other", ["sync", "keep1", "verify"])
def test_a_fit_to_one_run_predicts_all_three_within_15_per_cent(other):
    fit, measured = recorded("verify"), recorded(other)
    simulated = cluster(measured.config, fit).configured()
    assert simulated.step_seconds == pytest.approx(measured.step_seconds, rel=0.15)


@pytest.mark.parametrize("name", ["sync", "keep1", "verify"])
def test_a_fit_predicts_its_own_run_within_15_per_cent(name):
    fit = recorded(name)
    assert cluster(None, fit).configured().step_seconds == pytest.approx(fit.step_seconds, rel=0.15)


def test_fitted_costs_are_plausible():
    fit = recorded("verify")
    cost = fit.cost
    assert 0.001 < cost.decode(64, 0) < 0.1
    assert cost.speed(1) >= cost.speed(64) >= 1
    assert fit.lengths
    assert max(fit.lengths) <= fit.config.sampling.max_tokens
    assert fit.drift is not None
    assert 0 < fit.drift < 0.01
    assert recorded("sync").drift is None


def test_a_fit_knows_the_tail_and_the_noise_floor_and_leaves_the_rest_to_the_drift(tmp_path):
    shutil.copytree(RECORDED / "verify", tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    tokens = {"generated": 300_000, "verified": 90_000, "rejected": 10_000, "outside_top_k": 3900}

    def fitted(noise_floor):
        last = lines[-1] | {"tokens": tokens, "noise_floor": noise_floor}
        path.write_text("".join(json.dumps(line) + "\n" for line in [*lines[:-1], last]))
        fit = fit_run(tmp_path / "run")
        survival = Survival("block", outside=fit.outside, noise=fit.noise)
        return fit, survival.expected(fit.lengths, fit.drift)

    quiet, kept = fitted({})
    assert (quiet.outside, quiet.noise) == (0.01, 0.0)
    assert kept == pytest.approx(0.9, abs=1e-4)
    noisy, kept = fitted({"judged": 500, "abs_mean": 4e-3})
    assert noisy.noise == 2e-3
    assert kept == pytest.approx(0.9, abs=1e-4)
    assert noisy.drift == pytest.approx((quiet.drift**2 - 2e-3**2) ** 0.5, rel=1e-3)
    assert cluster(None, noisy).noise == 2e-3
    for apart in (0.3, 0.9):
        assert fitted({"judged": 500, "abs_mean": apart})[0].drift < 1e-6, "noise explains it all"


def test_rewards_that_delay_the_run_are_detected(tmp_path):
    """The same run, but samples always wait for their reward: 10 ms each, engine idle or not."""
    shutil.copytree(RECORDED / "sync", tmp_path / "run")
    path = tmp_path / "run" / "engine" / "generator-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for before, line in zip([lines[0], *lines], lines, strict=False):
        line["rewards_waiting"] = 50
        line["lengths"] = [30] * round((line["time"] - before["time"]) / 0.01)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fit, free = fit_run(tmp_path / "run"), recorded("sync")
    assert free.cost.reward(64) == free.cost.reward(0) == 0
    assert fit.cost.reward(0) == pytest.approx(0.01, rel=0.3)
    slow = cluster(None, fit).configured().step_seconds
    assert slow > 128 * 0.008


def test_a_directory_without_records_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not the directory of a run"):
        fit_run(tmp_path)
    shutil.copytree(RECORDED / "sync", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "engine")
    with pytest.raises(UserError, match="too few records of engine steps"):
        fit_run(tmp_path / "run")


def test_the_command_takes_a_run_and_a_configuration():
    arguments = [
        "simulate",
        str(RECORDED / "keep1" / "config.yaml"),
        "--from",
        str(RECORDED / "verify"),
    ]
    done = CliRunner().invoke(app, [*arguments, "--mode", "sync", "--mode", "verify", "--json"])
    assert done.exit_code == 0, done.output
    outcomes = json.loads(done.stdout)
    assert list(outcomes) == ["sync", "verify", "as configured"]
    assert outcomes["sync"]["step_seconds"] > outcomes["as configured"]["step_seconds"]
