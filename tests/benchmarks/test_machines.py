"""Machines made of namespaces: they reach each other, and can be cut off and switched off."""

from __future__ import annotations

import subprocess
import sys
import tempfile
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
    with (
        machines(["one", "two"], tmp_path, hidden={"two": [tmp_path]}) as (one, two),
        tempfile.NamedTemporaryFile(dir="/dev/shm") as shared,
    ):
        (tmp_path / "file").touch()
        assert one.run(["ls", str(tmp_path / "file")])
        assert two.run(["ls", "-A", str(tmp_path)]) == ""
        kept = Path.cwd().parts[3:4] if Path.cwd().is_relative_to("/dev/shm") else ()  # noqa: S108
        assert two.run(["ls", "-A", "/dev/shm"]).splitlines() == list(kept)  # noqa: S108
        assert Path(shared.name).exists()
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


@pytest.mark.parametrize("place", ["/tmp", "/var/tmp", "/home", "/dev/shm"])  # noqa: S108
def test_no_mount_of_a_machine_hides_the_checkout(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir=place, prefix="a käfer ") as checkout:
        monkeypatch.chdir(checkout)
        Path("file").touch()
        with machines(["one"], tmp_path) as (one,):
            assert one.run(["ls", "-A"]) == "file\n"
            assert one.run([sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"])
        monkeypatch.undo()
