"""Over which network the ranks of a trainer speak, and what is said where that fails."""

from __future__ import annotations

import ipaddress
import re
import socket

import msgspec
import pytest

from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import RankLost, TrainerError
from asyncrl.trainer.ranks import world
from asyncrl.trainer.ranks.world import Interface, Peer, check_peers, interface_in, listen_at

HERE = Peer("boot 1", "here", "127.0.0.1", 0)


def test_the_interface_is_found_by_its_name_or_by_the_range_of_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert interface_in("lo") == interface_in("127.0.0.0/8") == Interface("lo", "127.0.0.1")
    said = "lo 127.0.0.1, eth0 192.168.1.4, ib0 10.1.2.3, ib0 fd00::3"
    known = [one.split() for one in said.split(", ")]
    found = [(name, ipaddress.ip_address(address)) for name, address in known]
    monkeypatch.setattr(world, "_addresses", lambda: found)
    assert interface_in("ib0") == interface_in("10.1.0.0/16") == Interface("ib0", "10.1.2.3")
    assert interface_in("fd00::/8") == Interface("ib0", "fd00::3")
    with pytest.raises(TrainerError, match=f"no address in the network ib; it has {said}"):
        interface_in("ib")


@pytest.mark.parametrize(
    ("given", "kept", "said"),
    [
        ("10.1.2.3/16", "10.1.0.0/16", ""),
        ("eth0.7", "eth0.7", ""),
        ("10.1.2.3", "", "single machine; name the network.*10.1.2.0/24"),
        ("two words", "", "neither the name of a network interface"),
        ("10.1.0.0/40", "", "10.1.0.0/40"),
    ],
)
def test_a_network_is_an_interface_or_a_range(given: str, kept: str, said: str) -> None:
    if kept:
        assert TrainerConfig(rank_network=given).rank_network == kept
    else:
        with pytest.raises(ValueError, match=said):
            TrainerConfig(rank_network=given)


def test_ranks_on_loopback_are_refused_on_two_machines_and_nobody_is_asked_otherwise() -> None:
    other = msgspec.structs.replace(HERE, host="there")
    check_peers([HERE, other], 1, "lo")
    elsewhere = msgspec.structs.replace(other, machine="boot 2")
    with pytest.raises(TrainerError, match=r"rank 0 is on here, rank 1 on there, .*trusted_net"):
        check_peers([HERE, elsewhere], 0, "lo")


def test_a_rank_that_is_not_reached_is_named() -> None:
    with listen_at(Interface("lo", "127.0.0.1"), 2) as listener:
        port = listener.getsockname()[1]
        there = Peer("boot 2", "there", "127.0.0.1", port)
        check_peers([HERE, there], 0, "10.0.0.0/8")
    with pytest.raises(RankLost) as lost:
        check_peers([HERE, there], 0, "10.0.0.0/8")
    assert re.match(r"rank 0 on here \(127.0.0.1\) cannot reach rank 1 on there", str(lost.value))
    assert socket.gethostname() not in str(lost.value)
