"""The network that connects a trainer's ranks, and the check that they reach each other in it.

>>> interface_in("127.0.0.0/8")
Interface(name='lo', address='127.0.0.1')
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.trainer.base.errors import RankLost, TrainerError
from asyncrl.trainer.base.rank_network import apart, is_loopback

REACH_SECONDS = 15.0
_GET_ADDRESS = 0x8915

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Interface(msgspec.Struct, frozen=True):
    """A network interface of this machine."""

    name: str
    address: str


class Peer(msgspec.Struct, frozen=True):
    """A rank's announcement when it joins."""

    machine: str
    """Identifies the machine, or the container with its own network: the scope of loopback."""
    host: str
    address: str
    port: int
    """Port at which other ranks test the connection; 0 on loopback, where no test is needed."""

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


def interface_in(network: str) -> Interface:
    """Find this machine's interface in a network (see `network_of`), or raise TrainerError."""
    found = _addresses()
    for name, address in found:
        if name == network or ("/" in network and address in ipaddress.ip_network(network)):
            return Interface(name, str(address))
    listed = ", ".join(f"{name} {address}" for name, address in found) or "no address at all"
    raise TrainerError(
        f"trainer.rank_network: {socket.gethostname()} has no address in the network {network}; it "
        f"has {listed}"
    )


def _addresses() -> list[tuple[str, Address]]:
    """Each interface with its first IPv4 address, then those with an IPv6 address."""
    found: list[tuple[str, Address]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it does not have one
            found.append((name, ipaddress.IPv4Address(answer[20:24])))
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return found
    for line in lines:
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if not address.is_link_local:
            found.append((name, address))
    return found


def listen_at(interface: Interface, ranks: int) -> socket.socket:
    """Open a socket that others can try to reach; nothing is read from it."""
    family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
    return socket.create_server((interface.address, 0), family=family, backlog=ranks)


def this_machine() -> str:
    """Identify the machine and, in it, the network namespace of its loopback interface."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"


def check_peers(peers: Sequence[Peer], rank: int, network: str) -> None:
    """Check that this rank can connect to the others (`peers`, by rank).

    Raises TrainerError if loopback cannot connect them; RankLost if one cannot be reached.
    """
    own = peers[rank]
    for other, peer in enumerate(peers):
        if is_loopback(network) and peer.machine != own.machine:
            where = f"rank {rank} is on {own.host}, rank {other} on {peer.host}"
            raise TrainerError(apart(where, network))
        if is_loopback(network) or other == rank:
            continue
        try:
            socket.create_connection((peer.address, peer.port), REACH_SECONDS).close()
        except OSError as error:
            raise RankLost(
                f"rank {rank} on {own} cannot reach rank {other} on {peer}: {error}. The ranks' "
                "machines must reach each other at all TCP ports, which gloo and NCCL choose: open "
                "the firewall between them, or name another network (trainer.rank_network)"
            ) from error
