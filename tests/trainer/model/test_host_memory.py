"""What memory a machine has, and what is left of it, as its files and control groups say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.trainer.model.memory_estimate import host_bytes, memory_left

GIB = 2**30
Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of a machine whose root is `tmp_path`; this one has 8 GiB, 6 of them free."""

    def put(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    put("proc/meminfo", f"MemTotal: {8 * 2**20} kB\nMemAvailable: {6 * 2**20} kB\n")
    return put


def test_the_memory_of_a_machine_is_what_its_control_group_allows(
    tmp_path: Path, write: Write
) -> None:
    assert host_bytes(tmp_path / "nowhere") is None
    assert host_bytes(tmp_path) == 8 * GIB
    write("proc/self/cgroup", "0::/pod/container\n")
    write("sys/fs/cgroup/pod/container/memory.max", "max\n")
    write("sys/fs/cgroup/pod/memory.max", f"{4 * GIB}\n")
    assert host_bytes(tmp_path) == 4 * GIB, "the limit of a group above"
    write("proc/self/cgroup", "5:cpu,memory:/docker/1\n3:cpu:/\n")
    write("sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", f"{2 * GIB}\n")
    assert host_bytes(tmp_path) == 2 * GIB, "control groups of version 1"


@pytest.mark.parametrize(
    ("said", "folder", "names"),
    [
        ("0::/pod", "pod", ("memory.max", "memory.current", "inactive_file")),
        ("0::/../..", "", ("memory.max", "memory.current", "inactive_file")),
        (
            "5:memory:/docker",
            "memory/docker",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["version 2", "a path outside the name space", "version 1"],
)
def test_pages_of_files_are_left(
    tmp_path: Path, write: Write, said: str, folder: str, names: tuple[str, str, str]
) -> None:
    """A group that has written a checkpoint is full of them."""
    assert memory_left(tmp_path / "nowhere") is None
    assert memory_left(tmp_path) == 6 * GIB
    limit, used, cached = names
    write("proc/self/cgroup", f"{said}\n")
    write(f"sys/fs/cgroup/{folder}/{limit}", f"{4 * GIB}\n")
    write(f"sys/fs/cgroup/{folder}/{used}", f"{4 * GIB - 4096}\n")
    assert memory_left(tmp_path) == 4096
    stat = f"anon {GIB}\n{cached} {3 * GIB}\nactive_file 5\n"
    write(f"sys/fs/cgroup/{folder}/memory.stat", stat)
    assert memory_left(tmp_path) == 3 * GIB + 4096
