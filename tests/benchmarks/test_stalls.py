"""The proxy and the arithmetic of `benchmarks.chaos --stalls`."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest
from asyncrl_runs import until

from asyncrl.monitoring.records.group_account import GroupAccount
from benchmarks.chaos.live_run import ChaosError
from benchmarks.chaos.stalls import Proxy, Stall, Stalled

EXACT = GroupAccount(8, (), (), ())


def listening(path: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX)
    found.bind(str(path))
    found.listen()
    return found


def test_a_held_connection_gives_nothing_until_it_is_let_go(tmp_path: Path) -> None:
    folder = tmp_path / "asyncrl-x"
    folder.mkdir()
    proxy = Proxy(tmp_path)
    try:
        with listening(folder / "control") as hub, socket.socket(socket.AF_UNIX) as peer:
            until((folder / "control.held").exists, seconds=30, what="the proxy")
            until((folder / "control").exists, seconds=30, what="its socket")
            with pytest.raises(ChaosError, match="no connection to the socket control"):
                proxy.hold("control", random.Random(0))
            peer.connect(str(folder / "control"))
            served, _ = hub.accept()
            with served:
                peer.sendall(b"before")
                assert served.recv(6) == b"before"
                until(lambda: proxy.connections["control"], seconds=30, what="its number")
                proxy.hold("control", random.Random(0))
                peer.sendall(b"held")
                served.sendall(b"back")
                for one in (served, peer):
                    one.settimeout(0.1)
                    with pytest.raises(TimeoutError):
                        one.recv(1)
                    one.settimeout(30)
                proxy.let_go()
                assert (served.recv(4), peer.recv(4)) == (b"held", b"back")
            assert peer.recv(1) == b""
            until(lambda: not proxy.connections["control"], seconds=30, what="the end")
    finally:
        proxy.close()


def test_each_fault_alone_is_one() -> None:
    stall = Stall("generator", 3.0, 5, seconds_to_next_step=0.5)
    sound = Stalled(1, [stall], [EXACT])
    assert not sound.failed
    assert sound.ratios()["seconds_to_next_step_max"] == 0.5
    killed = Stall("trainer", 3.0, 5, 0.1, killed=("generator-0", "helper"))
    for worse, name, count in (
        (Stalled(1, [killed], [EXACT]), "honest_killed", 2),
        (Stalled(2, [stall], [EXACT]), "not_survived", 1),
        (Stalled(1, [stall], [GroupAccount(8, (), (3, 4), ())]), "groups_lost", 2),
        (Stalled(1, [stall], [GroupAccount(8, (), (), (3,))]), "groups_twice", 1),
        (Stalled(1, [stall], [GroupAccount(8, (3,), (), ())]), "groups_failed", 1),
        (Stalled(1, [stall], [EXACT], ["it ended"]), "runs_failed", 1),
    ):
        assert worse.failed
        assert worse.ratios()[name] == count
