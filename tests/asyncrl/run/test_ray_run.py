"""Whole runs on a real Ray cluster of several nodes on this machine."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from asyncrl_runs import CommandLine, until, worst_mismatch
from ray_nodes import RayNodes, ray_nodes

from asyncrl.launch.identity import status_of
from monitoring.discovery import targets_file
from monitoring.group_account import read_account

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

STEPS = 12
PATIENCE = 400
"""Seconds; nothing is decided by time on a machine that others use too."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    """Three nodes of one CPU, so that strict_spread places each process on another one."""
    with ray_nodes([1, 1, 1]) as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def _of_another_name_than_other_workers_runs(command_line: CommandLine) -> None:
    """So that what is in /dev/shm under this name is theirs."""
    command_line.name = f"on-ray-{secrets.token_hex(3)}"


def processes_of(command_line: CommandLine) -> list[int]:
    roles = ("trainer", "generator", "relay")
    return [pid for role in roles for pid in command_line.children(role)]


def metrics_of(command_line: CommandLine) -> dict[str, Callable[..., float]]:
    """For each process that Prometheus is told of, the value of a series of it."""

    def reader(process: str, target: str) -> Callable[..., float]:
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=60) as reply:
            lines = reply.read().decode().splitlines()

        def value(name: str, **labels: str) -> float:
            pairs = sorted((labels | {"process": process}).items())
            series = name + "{" + ",".join(f'{key}="{one}"' for key, one in pairs) + "}"
            [found] = [line for line in lines if line.startswith(f"{series} ")]
            return float(found.split()[-1])

        return value

    listed = json.loads(targets_file(command_line.folder).read_text())
    return {
        one["labels"]["instance"]: reader(one["labels"]["instance"], one["targets"][0])
        for one in listed
    }


def process_named(command_line: CommandLine, name: str) -> int:
    [found] = [
        pid
        for pid in processes_of(command_line)
        if f'"name":"{name}"'.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


def ends_with_nothing_left(command_line: CommandLine) -> None:
    until(lambda: not processes_of(command_line), seconds=PATIENCE, what="the end of all processes")
    until(
        lambda: not command_line.files_in_memory(),
        seconds=PATIENCE,
        what="the removal of files in memory",
    )


def test_bad_addresses_and_too_small_clusters_are_refused(
    command_line: CommandLine, cluster: RayNodes
) -> None:
    for settings, said in (
        ({"launcher__ray__address": "127.0.0.1:1"}, "nothing listens at 127.0.0.1:1"),
        ({"launcher__generators": 9}, "the run needs 10 CPU.* has 3 CPU"),
    ):
        settings = {"launcher__kind": "ray", "launcher__ray__address": cluster.address} | settings
        done = command_line.run(**settings)
        assert done.returncode == 2, done.stdout
        assert re.search(said, " ".join(done.stdout.split())), done.stdout
        assert not command_line.folder.exists()


def test_a_run_on_three_nodes_loses_a_child_an_actor_and_a_relay(
    command_line: CommandLine, cluster: RayNodes
) -> None:
    process = command_line.start(
        launcher__kind="ray",
        launcher__ray__address=cluster.address,
        launcher__ray__strategy="strict_spread",
        launcher__ray__relays="always",
        launcher__generators=2,
        run__steps=STEPS,
    )
    until(lambda: command_line.steps() >= 2, seconds=PATIENCE, what="two steps")
    first, second = sorted(command_line.children("generator"))
    relays = ("relay-0", "relay-1", "relay-2")
    files = {one: command_line.files_in_memory(one) for one in ("trainer", *relays)}
    assert files["trainer"]
    assert sum(map(bool, files.values())) == 3, "two relays have weights of their own"
    raylets = set()
    for pid in (*command_line.children("trainer"), first, second):
        worker = status_of(pid)
        assert worker is not None
        raylet = status_of(worker.parent)
        assert raylet is not None
        raylets.add(raylet.parent)
    assert len(raylets) == 3, "each process is on a node of its own"
    metrics = metrics_of(command_line)
    assert set(metrics) == {"controller", "trainer", "generator-0", "generator-1", *relays}
    for one in relays:
        assert metrics[one]("asyncrl_relay_frames_total", direction="up") > 0
        assert metrics[one]("asyncrl_relay_frames_total", direction="down") > 0
        fetched = metrics[one]("asyncrl_relay_weights_received_bytes_total")
        assert (fetched > 0) == bool(files[one])
        whole = metrics[one]("asyncrl_relay_weights_fetches_total", outcome="whole")
        assert (whole >= 1) == bool(files[one])
    sent = "asyncrl_relay_weights_sent_bytes_total"
    until(
        lambda: any(metrics_of(command_line)[one](sent) for one in relays),
        seconds=PATIENCE,
        what="a relay that has sent weights",
    )
    os.kill(first, signal.SIGKILL)
    relay = next(one for one in files if one != "trainer" and files[one])
    os.kill(process_named(command_line, relay), signal.SIGKILL)
    until(lambda: command_line.steps() >= 5, seconds=PATIENCE, what="five steps")
    status = status_of(second)
    assert status is not None
    os.kill(status.parent, signal.SIGKILL)  # the actor's worker
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    text = " ".join(output.split())
    assert "was killed by SIGKILL" in text
    assert "its Ray actor was lost" in text
    assert text.count("in place of generator-") == 2
    assert f"started {relay}.1 in place of {relay}" in text
    assert "version" in (command_line.folder / "logs" / f"{relay}.1.log").read_text()
    result = command_line.result()
    assert (result.steps, result.staleness.max) == (STEPS, 0)
    assert result.exactly_on_policy
    steps = command_line.metrics()
    assert [step.step for step in steps] == list(range(STEPS))
    assert worst_mismatch(steps) < 1e-3
    assert read_account(command_line.folder).is_exact
    ends_with_nothing_left(command_line)


def test_a_killed_controller_and_a_dead_head_leave_nothing(
    command_line: CommandLine, cluster: RayNodes
) -> None:
    settings = {
        "launcher__kind": "ray",
        "launcher__ray__address": cluster.address,
        "run__steps": 1000,
    }
    killed = command_line.start(**settings, trainer__ranks=2)
    until(lambda: command_line.steps() >= 1, seconds=PATIENCE, what="a step")
    assert len(command_line.children("trainer")) == 2, "one on each node, as each has one CPU"
    killed.kill()
    killed.communicate(timeout=30)
    ends_with_nothing_left(command_line)
    settings |= {"launcher__weights": "broadcast", "launcher__trusted_network": True}
    process = command_line.start("--resume", **settings)
    before = command_line.steps()
    until(lambda: command_line.steps() > before, seconds=PATIENCE, what="another step")
    cluster.kill_head()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, output
    assert "has not answered for" in " ".join(output.split())
    ends_with_nothing_left(command_line)
    assert list((command_line.folder / "checkpoints").glob("step-*")), "it can be resumed"
    log = (command_line.folder / "logs" / "trainer.log").read_text()
    assert re.search(r"broadcast to 1 engine processes in [\d.]+ s: whole", log)
