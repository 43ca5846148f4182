import json
import os
import socket

import pytest

from asyncrl.monitoring.metrics.discovery import (
    Target,
    Targets,
    metrics_line,
    target_groups,
    targets_file,
)


def test_the_file_has_the_processes_that_there_are_until_the_run_ends(tmp_path):
    path = targets_file(tmp_path / "runs" / "first")
    path.parent.mkdir()
    targets = Targets(path, "first", host="127.0.0.1", port=9100)
    targets.update({"generator-0": Target(9101), "trainer": Target(9102)})
    listed = {one["labels"]["instance"]: one["targets"] for one in json.loads(path.read_text())}
    assert listed == {
        "controller": ["127.0.0.1:9100"],
        "generator-0": ["127.0.0.1:9101"],
        "trainer": ["127.0.0.1:9102"],
    }
    targets.update({"generator-0.1": Target(9103), "trainer": Target(9102)})
    groups = json.loads(path.read_text())
    assert [one["labels"]["instance"] for one in groups] == [
        "controller",
        "generator-0.1",
        "trainer",
    ]
    assert {one["labels"]["run"] for one in groups} == {"first"}
    assert list(path.parent.iterdir()) == [path], "a file of a replacement is left"
    assert metrics_line(tmp_path / "runs" / "first") == [
        f"metrics: http://127.0.0.1:9100/metrics (controller), all addresses in {path}"
    ]
    targets.remove()
    targets.remove()
    assert not path.exists()
    assert metrics_line(tmp_path / "runs" / "first") == [], "`asyncrl status` says nothing"


def test_the_file_is_written_when_something_changes_and_not_before(tmp_path):
    path = tmp_path / "prometheus-r.json"
    targets = Targets(path, "r", host="127.0.0.1", port=1)
    targets.update({"trainer": Target(2)})
    path.unlink()
    targets.update({"trainer": Target(2)})
    assert not path.exists()
    os.umask(0o077)  # as of a run, whose files nobody else reads
    targets.update({"trainer": Target(3)})
    assert path.stat().st_mode & 0o777 == 0o644, "Prometheus may be another user"


def test_a_disk_that_does_not_take_it_is_logged_once_and_tried_again(tmp_path, caplog):
    folder = tmp_path / "runs"
    targets = Targets(folder / "prometheus-r.json", "r", host="127.0.0.1", port=1)
    for _ in range(3):
        targets.update({})
    assert len(caplog.records) == 1
    folder.mkdir()
    targets.update({})
    assert (folder / "prometheus-r.json").exists()


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("::1", "[::1]:7"),
        ("::", f"{socket.gethostname()}:7"),
        ("gpu-3.example.org", "gpu-3.example.org:7"),
    ],
)
def test_addresses(host, address):
    (group,) = target_groups("r", host, {"trainer": Target(7)})
    assert group["targets"] == [address]


@pytest.mark.parametrize(
    ("host", "listed"),
    [
        ("127.0.0.1", {"near": "127.0.0.1:1"}),
        ("localhost", {"near": "localhost:1"}),
        ("::1", {"near": "[::1]:1"}),
        (
            "0.0.0.0",  # noqa: S104
            {"near": f"{socket.gethostname()}:1", "far": "10.0.0.7:2", "six": "[fd00::7]:3"},
        ),
        ("10.0.0.7", {"near": "10.0.0.7:1", "far": "10.0.0.7:2", "six": "10.0.0.7:3"}),
    ],
)
def test_processes_of_other_nodes_are_listed_where_they_can_be_reached(host, listed):
    targets = {"near": Target(1), "far": Target(2, "10.0.0.7"), "six": Target(3, "fd00::7")}
    found = {g["labels"]["instance"]: g["targets"] for g in target_groups("r", host, targets)}
    assert found == {name: [address] for name, address in listed.items()}
