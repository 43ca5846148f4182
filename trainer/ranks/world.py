"""The ranks of a trainer, which exchange bytes and tensors, never pickles.

Every exchange is a collective: all ranks must make the same ones in the same order. A waiting rank
gets an error when another rank is lost, or has not come within the limit; then the whole trainer is
replaced. `ALONE` is a trainer of one process, which exchanges nothing and waits for nothing.

    >>> ALONE.leads, ALONE.gather(b"tokens", "totals")
    (True, [b'tokens'])
    >>> interface_in("127.0.0.0/8")
    Interface(name='lo', address='127.0.0.1')
"""

import contextlib
import fcntl
import ipaddress
import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.trainer.base.errors import RankLost, TrainerError
from asyncrl.trainer.base.rank_network import LOOPBACK, apart, is_loopback

REACH_SECONDS = 15.0
_GET_ADDRESS = 0x8915

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_PREFIX = "rank-"
# Their names until torch 2.12; since then the old ones warn.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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


class World:
    """One rank among others, from 0. `join` connects several."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def leads(self) -> bool:
        """True if this rank publishes weights, writes checkpoints and reports steps."""
        return self.rank == 0

    def gather(self, own: bytes, what: str) -> list[bytes]:
        """Return each rank's bytes, by rank. Raises RankLost, naming `what`."""
        if self.size == 1:
            return [own]
        with self._waiting(what):
            sizes = torch.empty(self.size, dtype=torch.int64)
            _all_gather(sizes, torch.tensor([len(own)]))
            longest = max(1, int(sizes.max()))
            padded = torch.frombuffer(bytearray(own.ljust(longest, b"\0")), dtype=torch.uint8)
            received = torch.empty(self.size * longest, dtype=torch.uint8)
            _all_gather(received, padded)
        rows = received.view(self.size, longest)
        return [rows[rank, :size].numpy().tobytes() for rank, size in enumerate(sizes.tolist())]

    def barrier(self, what: str) -> None:
        """Wait until every rank is here. Raises RankLost."""
        self.gather(b"", what)

    def decided(self, own: bool, what: str) -> bool:
        """Return rank 0's decision. Raises RankLost."""
        return self.gather(b"\1" if own else b"", what)[0] == b"\1"

    def any(self, own: bool, what: str) -> bool:
        """Return True if it is true on any rank. Raises RankLost."""
        return b"\1" in self.gather(b"\1" if own else b"", what)

    def agree(self, own: str, what: str) -> None:
        """Raise TrainerError if the ranks' values differ, or RankLost."""
        found = self.gather(own.encode(), what)
        if len(set(found)) > 1:
            said = "; ".join(f"rank {rank}: {one.decode()}" for rank, one in enumerate(found))
            raise TrainerError(f"the ranks of the trainer disagree on {what}: {said}")

    def norm(self, own: float) -> float:
        """Combine each rank's norm into the Euclidean norm over all; the same number on each."""
        if self.size == 1:
            return own
        found = self.gather(struct.pack("<d", own), "the gradient's norm")
        return math.hypot(*(struct.unpack("<d", one)[0] for one in found))

    def reduce_scatter(self, own: Tensor, given: Tensor, what: str) -> None:
        """Sum `[size, n]` over the ranks and put this rank's row into `own` `[n]`."""
        with self._waiting(what):
            _reduce_scatter(own, given.view(-1))

    def all_gather(self, all_rows: Tensor, own: Tensor, what: str) -> None:
        """Put each rank's `own` `[n]` into its row of `[size, n]`."""
        with self._waiting(what):
            _all_gather(all_rows.view(-1), own)

    def close(self) -> None:
        """Leave without waiting. Idempotent."""
        if self.size > 1 and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # torch's DistError and Gloo's are of this kind
            first = next(iter(str(error).splitlines()), "")
            seconds = time.monotonic() - began
            raise RankLost(
                f"rank {self.rank} of {self.size} waited {seconds:.1f} s for the other ranks of "
                f"the trainer to exchange {what}, and lost one: {first}"
            ) from error


ALONE = World()


def join(
    meeting: Path,
    rank: int,
    size: int,
    *,
    on_gpu: bool,
    join_seconds: float,
    seconds: float,
    network: str = LOOPBACK,
) -> World:
    """Meet the other ranks, through a file, and connect to them. Once per process.

    `meeting` does not exist yet; it is in a folder that only this user can access and all ranks
    see. With `size` 1 there is no file. `on_gpu`: NCCL instead of gloo. `join_seconds` is the
    longest wait for the others, `seconds` that of an exchange, `network` is `trainer.rank_network`.

    Raises RankLost if a rank did not come or cannot be reached; TrainerError if this machine is not
    in that network, or the ranks are on several machines although the network is loopback.
    """
    if size == 1:
        return ALONE
    here = interface_in(network)
    # gloo and NCCL do not support keys, so they listen in this network only.
    os.environ["GLOO_SOCKET_IFNAME"] = here.name
    os.environ["NCCL_SOCKET_IFNAME"] = f"={here.name}"  # exactly this name, not a prefix
    with contextlib.ExitStack() as closing:
        port = 0
        if not is_loopback(network):
            listener = closing.enter_context(listen_at(here, size))
            port = int(listener.getsockname()[1])
        own = Peer(this_machine(), socket.gethostname(), here.address, port)
        store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
        check_peers(_meet(store, own, rank, size, join_seconds), rank, network)
        world = World(rank, size)
        # The listener stays until all are connected: another rank may still try it.
        with world._waiting("addresses"):  # noqa: SLF001 - its own module
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=seconds),
            )
    return world


def _meet(store: Any, own: Peer, rank: int, size: int, join_seconds: float) -> list[Peer]:
    """Announce this rank, and wait for the announcements of all; by rank."""
    store.set_timeout(timedelta(seconds=join_seconds))
    names = [f"{_PREFIX}{one}" for one in range(size)]
    store.set(names[rank], msgspec.json.encode(own).decode())
    try:
        store.wait(names, timedelta(seconds=join_seconds))
    except RuntimeError as error:
        missing = [name for name in names if not store.check([name])]
        raise RankLost(
            f"{', '.join(missing)} of the trainer did not join within {join_seconds:.0f} s "
            "(launcher.startup_seconds)"
        ) from error
    return [msgspec.json.decode(store.get(name), type=Peer) for name in names]
