"""Pinning: the cores of each process of a run."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.cores import HELPER_CORES, CorePlan, plan_cores, stay_on, usable_cores
from asyncrl.errors import UserError
from asyncrl.launch.child_spec import GeneratorSpec, keys_of
from asyncrl.launch.local import LocalLauncher
from asyncrl.launch.records import ProcessRecords
from asyncrl.wire import RunKey

needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


@pytest.mark.parametrize(
    ("cores", "generators", "threads"), list(itertools.product((2, 3, 8, 9), (1, 2, 3), (1, 2)))
)
def test_no_core_is_given_twice_and_helpers_never_share_a_core_with_a_generator(
    cores: int, generators: int, threads: int
) -> None:
    available = [2 * core + 1 for core in range(cores)]
    if (generators + 1) * threads > cores:
        with pytest.raises(UserError, match="pin_cores"):
            plan_cores(available, generators=generators, threads=threads)
        return
    plan = plan_cores(available, generators=generators, threads=threads)
    given = [*itertools.chain(*plan.generators), *plan.trainer]
    assert len(given) == len(set(given)) == (generators + 1) * threads
    assert set(given) | set(plan.helpers) == set(available)
    assert not set(plan.helpers) & set(itertools.chain(*plan.generators))
    assert plan.helpers == plan.trainer or not set(plan.helpers) & set(plan.trainer)


def test_a_replacement_has_the_cores_of_its_predecessor() -> None:
    plan = CorePlan(((0,), (1,)), (2,), (2,))
    assert plan.of("generator-1") == plan.of("generator-1.3") == (1,)
    assert plan.of("trainer") == (2,)


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 2),
        ("0::/", {"cpu.max": "150000 100000"}, 1),
        ("0::/box/inner", {"box/cpu.max": "100000 100000", "box/inner/cpu.max": "max 100000"}, 1),
        ("1:cpu,cpuacct:/docker/1", {"cpu,cpuacct/cpu.cfs_quota_us": "50000"}, 1),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1"}, 2),
        ("1:cpuset:/", {"cpuset/cpu.cfs_quota_us": "1000"}, 2),
    ],
)
def test_a_containers_quota_counts_as_its_cores(
    groups: str, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 5})
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{groups}\n")
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        file.with_name("cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == cores


@needs_two
def test_all_threads_and_later_children_are_pinned() -> None:
    code = """
import os, subprocess, sys, threading
from asyncrl.cores import stay_on
stop = threading.Event()
early = threading.Thread(target=stop.wait)
early.start()
core = max(os.sched_getaffinity(0))
stay_on([core])
threads = [int(name) for name in os.listdir("/proc/self/task")]
assert len(threads) >= 2
assert all(os.sched_getaffinity(thread) == {core} for thread in threads)
stop.set()
child = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
assert subprocess.check_output(child, text=True).strip() == str({core})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture
def own_cores() -> Iterator[set[int]]:
    """The launcher pins this process too; undo that."""
    cores = os.sched_getaffinity(0)
    yield cores
    stay_on(sorted(cores))


def _spec(name: str, folder: Path) -> GeneratorSpec:
    # Its parent is another process, so the child exits at once.
    return GeneratorSpec(
        name=name,
        run_directory=str(folder),
        model_path="",
        control_address="",
        data_address="",
        parent=1,
        threads=1,
    )


def _environment(pid: int) -> list[str]:
    """The environment of a process, as soon as the kernel has set it up."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := Path(f"/proc/{pid}/environ").read_bytes():
            return found.decode().split("\0")
    raise AssertionError(f"process {pid} has no environment")


@needs_two
def test_the_launcher_pins_each_process_to_its_core(tmp_path: Path, own_cores: set[int]) -> None:
    cores = sorted(own_cores)
    launcher = LocalLauncher(
        tmp_path, ProcessRecords(tmp_path), generators=1, threads=1, pin_cores=True
    )
    assert os.sched_getaffinity(0) == own_cores  # this process is pinned with its first child
    for name, core in (("generator-0", cores[0]), ("trainer", cores[1])):
        process = launcher.start(_spec(name, tmp_path), keys_of(RunKey.new(), name, "generator"))
        assert os.sched_getaffinity(process._process.pid) == {core}
        assert os.sched_getaffinity(0) == set(cores[2:] or cores[1:])
        helpers = ",".join(map(str, cores[2:] or cores[1:]))
        environment = _environment(process._process.pid)
        process._process.wait(timeout=60)
        assert f"{HELPER_CORES}={helpers}" in environment
        assert "TQDM_DISABLE=1" in environment  # a full disk would not take its log
