"""A run on two machines with nothing in common but the network, the second of which is cut off."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from asyncrl_runs import OWN, UNHURRIED, worst_mismatch
from forked_machines import forking_on_machines

from asyncrl.monitoring.metrics.discovery import targets_file
from asyncrl.monitoring.records.group_account import read_account
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.monitoring.records.samples import read_samples
from asyncrl.monitoring.records.spans import read_spans
from benchmarks.chaos.cluster_run import ClusterRun
from benchmarks.chaos.live_run import Setup
from benchmarks.machines.namespaces import why_not
from benchmarks.machines.ray import RayMachines, ray_machines

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

SETTINGS = (
    *("launcher.generators=1", "monitoring.live=plain", "trainer.checkpoint_every=2"),
    f"rewards.functions={UNHURRIED}",
    *("monitoring.host=0.0.0.0", "monitoring.report_samples=200"),
    *("launcher.ray.trainer.resources={one: 1}", "launcher.ray.generator.resources={two: 1}"),
)
STEPS = 2000
"""More than are done: the run is ended once it has gone on after the cut."""
RECORDED = STEPS // (2 * 200)
"""A sample of each so manyth step is written to samples.jsonl."""
CUT_SECONDS = 3.0


def the_runs_folder_has_all_files_of(run: Path, name: str, end: float) -> None:
    """Of a process on the machine that does not see the folder, up to the end of the last step."""
    assert "INFO" in (run / "logs" / f"{name}.log").read_text()
    spans = read_spans(run / "timeline" / f"{name}.jsonl")
    assert spans[0].kind == "starting"
    assert spans[-1].end > end
    assert list((run / "slots").glob(f"{name}.jsonl"))
    assert (run / "engine" / f"{name}.jsonl").read_bytes().endswith(b"\n")
    recorded = set(range(0, len(read_metrics(run / "metrics.jsonl")), RECORDED))
    assert len(recorded) > 1
    assert recorded <= {one.step for one in read_samples(run / "samples.jsonl")}
    assert list((run / "unfinished").glob(f"step-*/{name}.bin"))
    assert (run / "cache" / f"{name}.snapshot").stat().st_size
    assert name in (run / "report.html").read_text()


def targets_of(run: Path) -> dict[str, str]:
    """Addresses by process, as Prometheus is told of them."""
    listed = json.loads(targets_file(run).read_text())
    return {one["labels"]["instance"]: one["targets"][0] for one in listed}


def metrics_of_the_other_machine_can_be_scraped(
    run: ClusterRun, cluster: RayMachines, relay: str
) -> None:
    """From the controller's, where Prometheus is told of them under the other one's address."""
    everyone = {"controller", "trainer", "relay-0", "generator-0", "relay-1"}
    run.until(lambda: set(targets_of(run.path)) == everyone, "a target for each process")
    targets = targets_of(run.path)
    code = (
        "import sys, urllib.request as r\n"
        "for url in sys.argv[1:]: print(r.urlopen(url, timeout=60).read())"
    )
    series = {
        "generator-0": "asyncrl_generated_tokens_total",
        relay: "asyncrl_relay_weights_received_bytes_total",
    }
    assert all(targets[name].startswith(cluster.machines["two"].address + ":") for name in series)
    urls = [f"http://{targets[name]}/metrics" for name in series]
    text = cluster.machines["one"].run([sys.executable, "-c", code, *urls], 150)
    for name, metric in series.items():
        assert f'{metric}{{process="{name}"}}' in text


def test_a_run_on_two_machines_survives_a_short_cut(tmp_path: Path, own_model: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    cpus = {"one": 1, "two": 1}
    with (
        forking_on_machines(),
        ray_machines(cpus, tmp_path / "machines", hidden={"two": [runs]}) as cluster,
    ):
        setup = Setup(OWN / "run.yaml", runs, (f"model.path={own_model}", *SETTINGS), 400)
        run = ClusterRun(setup, "run", STEPS, cluster=cluster, controller_machine="one")
        try:
            run.start()
            run.until(lambda: len(run.records()) >= 2, "two steps")
            run.note_sockets()
            before = {one.name: one.machine.name for one in run.on()}
            actors = [one.having("ray::AgentActor") for one in cluster.machines.values()]
            assert list(map(len, actors)) == [1, 1]
            relays = {before.pop(name): name for name in ("relay-0", "relay-1")}
            assert before == {"trainer": "one", "generator-0": "two"}
            assert set(relays) == {"one", "two"}
            metrics_of_the_other_machine_can_be_scraped(run, cluster, relays["two"])
            cluster.machines["two"].cut()
            time.sleep(CUT_SECONDS)  # the fault; nothing is waited for
            enough = max(len(run.records()) + 2, RECORDED + 2)
            cluster.machines["two"].heal()
            run.until(lambda: len(run.records()) >= enough, "steps after the cut")
            assert run.end() == 0
        finally:
            run.abandon()
        steps = run.records()
        assert [step.step for step in steps] == list(range(len(steps)))
        assert read_account(run.path).is_exact
        assert max(step.staleness.max for step in steps) == 0
        assert worst_mismatch(steps) < 1e-3
        assert "in place of" not in run.output()
        the_runs_folder_has_all_files_of(run.path, "generator-0", steps[-1].time)
        assert set(run.leftovers().values()) == {0}
