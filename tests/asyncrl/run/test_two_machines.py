"""A run on two machines with nothing in common but the network, the second of which is cut off."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from asyncrl_runs import OWN, worst_mismatch

from benchmarks.chaos.cluster_run import ClusterRun
from benchmarks.chaos.live_run import Setup
from benchmarks.machines.namespaces import why_not
from benchmarks.machines.ray import ray_machines
from monitoring.group_account import read_account

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

SETTINGS = (
    *("launcher.generators=1", "monitoring.live=plain", "trainer.checkpoint_every=2"),
    *("launcher.ray.trainer.resources={one: 1}", "launcher.ray.generator.resources={two: 1}"),
)
STEPS = 8
CUT_SECONDS = 3.0


def test_a_run_on_two_machines_survives_a_short_cut(tmp_path: Path, own_model: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    cpus = {"one": 1, "two": 1}
    with ray_machines(cpus, tmp_path / "machines", hidden={"two": [runs]}) as cluster:
        setup = Setup(OWN / "run.yaml", runs, (f"model.path={own_model}", *SETTINGS), 400)
        run = ClusterRun(setup, "run", STEPS, cluster=cluster, controller_machine="one")
        try:
            run.start()
            run.until(lambda: len(run.records()) >= 2, "two steps")
            run.note_sockets()
            before = {one.name: one.machine.name for one in run.on()}
            assert before == {
                "trainer": "one", "relay-0": "one", "generator-0": "two", "relay-1": "two"
            }  # fmt: skip
            cluster.machines["two"].cut()
            time.sleep(CUT_SECONDS)  # the fault; nothing is waited for
            assert len(run.records()) < STEPS
            cluster.machines["two"].heal()
            assert run.end(in_order=False) == 0
        finally:
            run.abandon()
        steps = run.records()
        assert [step.step for step in steps] == list(range(STEPS))
        assert read_account(run.path).is_exact
        assert max(step.staleness.max for step in steps) == 0
        assert worst_mismatch(steps) < 1e-3
        assert "in place of" not in run.output()
        assert "on node 192.0.2.2" in (run.path / "logs" / "generator-0.log").read_text()
        assert set(run.leftovers().values()) == {0}
