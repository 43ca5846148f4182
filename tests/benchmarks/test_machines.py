"""Machines made of namespaces: they reach each other, and can be cut off and switched off."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.machines.namespaces import Machine, machines, wait_until, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

LISTEN = "import socket, sys, time; s = socket.create_server((sys.argv[1], 7)); time.sleep(900)"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 7), 1)"


def reaches(one: Machine, other: Machine) -> bool:
    try:
        one.run([sys.executable, "-S", "-c", CONNECT, other.address], 30)
    except subprocess.CalledProcessError:
        return False
    return True


def test_machines_reach_each_other_unless_cut_off_and_end_together(tmp_path: Path) -> None:
    with machines(["one", "two"], tmp_path, hidden={"two": [tmp_path]}) as (one, two):
        (tmp_path / "file").touch()
        assert one.run(["ls", str(tmp_path / "file")])
        assert two.run(["ls", "-A", str(tmp_path), "/dev/shm"]).split() == [  # noqa: S108
            "/dev/shm:",  # noqa: S108
            f"{tmp_path}:",
        ]
        assert two.run(["hostname"]) == "two\n"
        listener = one.start([sys.executable, "-S", "-c", LISTEN, one.address])
        wait_until(lambda: reaches(two, one), "a connection", 60)
        two.cut()
        assert not reaches(two, one)
        two.heal()
        wait_until(lambda: reaches(two, one), "a connection again", 60)
        sleeper = two.start(["sleep", "1000"])
        assert two.having("sleep", "1000") == [sleeper.pid]
        two.power_off()
        assert sleeper.wait(30) == -9
        two.power_on()
        assert two.processes() == []
    assert listener.wait(30) == -9
