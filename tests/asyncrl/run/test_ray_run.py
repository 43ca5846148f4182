"""Whole runs on a real Ray cluster of several nodes on this machine."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from asyncrl_runs import UNHURRIED, CommandLine, call_here, until, worst_mismatch
from ray_nodes import RayNodes, ray_nodes

from asyncrl.launch.identity import status_of
from asyncrl.launch.ray.actor import NODE_VARIABLE
from asyncrl.launch.ray.launcher import DRIVER_MODULE
from asyncrl.monitoring.metrics.discovery import targets_file
from asyncrl.monitoring.records.group_account import read_account
from asyncrl.wire.records.step import is_on_policy
from benchmarks.harness import children_by_parent, cpu_seconds

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("_forked_runs")]

RELAYS = ("relay-0", "relay-1", "relay-2")
PATIENCE = 400
"""Seconds; nothing is decided by time on a machine that others use too."""
SECONDS_OF_DRIVER = 2.0
"""CPU seconds of a driver without a head. It waits for 15 s."""


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


def ends_with_nothing_left(command_line: CommandLine, but: str = "nothing") -> None:
    """Wait until no process is left, and no file in memory but one whose name ends so."""
    until(lambda: not processes_of(command_line), seconds=PATIENCE, what="the end of all processes")
    until(
        lambda: all(file.name.endswith(but) for file in command_line.files_in_memory()),
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
        done = call_here(command_line.arguments(**settings))
        assert done.returncode == 2, done.stdout
        assert re.search(said, " ".join(done.stdout.split())), done.stdout
        assert not command_line.folder.exists()


def test_a_run_on_three_nodes_loses_everything_in_turn_and_leaves_nothing(
    command_line: CommandLine, cluster: RayNodes
) -> None:
    """A child, an actor, a relay and the controller; and, resumed with two ranks, the head."""
    settings = {
        "launcher__kind": "ray",
        "launcher__ray__address": cluster.address,
        "run__steps": 1000,
        "rewards__functions": UNHURRIED,
    }
    command_line.phase("it trains on a node for each process")
    process = command_line.start(
        **settings,
        launcher__ray__strategy="strict_spread",
        launcher__ray__relays="always",
        launcher__generators=2,
    )
    command_line.wait_for_steps(2)
    first, second = sorted(command_line.children("generator"))
    files = {one: command_line.files_in_memory(one) for one in ("trainer", *RELAYS)}
    assert files["trainer"]
    assert sum(map(bool, files.values())) == 3, "two relays have weights of their own"
    each_process_is_on_a_node_of_its_own([*command_line.children("trainer"), first, second])
    every_relay_has_passed_frames_and_fetched(command_line, files, process)
    command_line.phase("a child, a relay and an actor are killed")
    os.kill(first, signal.SIGKILL)
    relay = next(one for one in files if one != "trainer" and files[one])
    os.kill(process_named(command_line, relay), signal.SIGKILL)
    command_line.wait_for_steps(5)
    os.kill(worker_of(second), signal.SIGKILL)
    logs = command_line.folder / "logs"
    until(
        lambda: len(list(logs.glob("generator-?.?.log"))) == 2,
        seconds=PATIENCE,
        what="another generator in place of each",
        run=process,
    )
    before = command_line.steps()
    command_line.wait_for_steps(before + 2)
    command_line.phase("the run is killed")
    process.kill()
    text = " ".join(process.communicate(timeout=PATIENCE)[0].split())
    mark = f"-{process.pid}-owner"  # of the controller, which the next run on its machine removes
    ends_with_nothing_left(command_line, but=mark)
    assert "was killed by SIGKILL" in text
    assert "its Ray actor was lost" in text
    assert text.count("in place of generator-") == 2
    assert f"started {relay}.1 in place of {relay}" in text
    assert "version" in (logs / f"{relay}.1.log").read_text()

    command_line.phase("it is resumed with two ranks")
    settings |= {"launcher__weights": "broadcast", "launcher__trusted_network": True}
    process = command_line.start("--resume", **settings, trainer__ranks=2)
    before = command_line.steps()
    command_line.wait_for_steps(before + 1)
    assert len(command_line.children("trainer")) == 2, "one on each node, as each has one CPU"
    steps = command_line.metrics()
    assert [step.step for step in steps] == list(range(len(steps)))
    assert {is_on_policy(step) for step in steps} == {True}
    assert worst_mismatch(steps) < 1e-3
    command_line.phase("the head is killed")
    cluster.kill_head()
    the_driver_waits_without_computing(process)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, output
    assert "has not answered for" in " ".join(output.split())
    ends_with_nothing_left(command_line)
    assert read_account(command_line.folder).is_exact
    assert list((command_line.folder / "checkpoints").glob("step-*")), "it can be resumed"
    log = (logs / "trainer.log").read_text()
    assert re.search(r"broadcast to 1 engine processes in [\d.]+ s: whole", log)


def parent_of(pid: int) -> int:
    status = status_of(pid)
    assert status is not None
    return status.parent


def worker_of(process: int) -> int:
    """The Ray worker with the actor that has started its agent."""
    return parent_of(parent_of(process))


def the_driver_waits_without_computing(process: subprocess.Popen[str]) -> None:
    """Until its run ends without a head, after `HEAD_SECONDS` and a checkpoint.

    Args:
        process: the controller.
    """
    [driver] = [
        pid
        for pid in children_by_parent()[process.pid]
        if DRIVER_MODULE.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    spent = [cpu_seconds(driver)]

    def has_ended() -> bool:
        spent.append(cpu_seconds(driver))
        return process.poll() is not None

    until(has_ended, seconds=PATIENCE, what="the end of a run without a head")
    assert max(spent) - spent[0] < SECONDS_OF_DRIVER


def each_process_is_on_a_node_of_its_own(processes: list[int]) -> None:
    """By what Ray has told the agents."""
    nodes = [
        one
        for pid in processes
        for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if one.startswith(NODE_VARIABLE.encode())
    ]
    assert len(nodes) == len(set(nodes)) == len(processes)


def every_relay_has_passed_frames_and_fetched(
    command_line: CommandLine, files: dict[str, list[Path]], process: subprocess.Popen[str]
) -> None:
    """Those that have weights of their own in memory have fetched them, and one has sent them."""
    metrics = metrics_of(command_line)
    assert set(metrics) == {"controller", "trainer", "generator-0", "generator-1", *RELAYS}
    for one in RELAYS:
        assert metrics[one]("asyncrl_relay_frames_total", direction="up") > 0
        assert metrics[one]("asyncrl_relay_frames_total", direction="down") > 0
        fetched = metrics[one]("asyncrl_relay_weights_received_bytes_total")
        assert (fetched > 0) == bool(files[one])
        whole = metrics[one]("asyncrl_relay_weights_fetches_total", outcome="whole")
        assert (whole >= 1) == bool(files[one])
    sent = "asyncrl_relay_weights_sent_bytes_total"
    until(
        lambda: any(metrics_of(command_line)[one](sent) for one in RELAYS),
        seconds=PATIENCE,
        what="a relay that has sent weights",
        run=process,
    )
