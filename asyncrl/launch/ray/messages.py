"""What controller and broker say to each other: MessagePack with its length before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from asyncrl.launch.nodes import NodeInfo
from asyncrl.launch.ray.nodes import Slot

_LENGTH_BYTES = 4


class Open(msgspec.Struct, frozen=True, tag=True):
    """Connect, and reserve room for the processes."""

    address: str | None
    slots: tuple[Slot, ...]
    strategy: str
    runtime_env: str
    """JSON."""
    question: str
    """JSON: what the actor is asked about its node (`actor.ProcessActor.describe`)."""
    connect_seconds: float
    place_seconds: float


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start a process in a slot, in place of what was there, or on a node."""

    slot: int | None
    """None: it takes nothing of its node."""
    name: str
    order: str
    """JSON, see `actor.ProcessActor.start`."""
    keys: bytes
    """`ChildKeys`, for its standard input. Printing this shows them, so nobody does."""
    node: str = ""
    """Ray's id of its node, where it has no slot."""

    def __repr__(self) -> str:
        """Without the keys."""
        return f"Start({self.slot}, {self.name!r}, {self.node!r})"


class End(msgspec.Struct, frozen=True, tag=True):
    """End a process, or kill it."""

    name: str
    by_force: bool


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Find room for a generator that joins; answered by `Reserved`."""

    slot: int
    """Which no process of the run has."""
    what: Slot
    seconds: float
    """Longest wait for it."""


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """The room of a joiner is not needed any more. Other slots stay reserved."""

    slot: int


ToBroker = Open | Start | End | Reserve | GiveBack


class Stage(msgspec.Struct, frozen=True, tag=True):
    """The broker begins to wait for something."""

    what: str
    seconds: float
    """It takes no longer than this, or it hangs."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """There is room for every process."""

    address: str
    """Of the head."""
    node_ip: str
    """By which Ray knows this machine."""
    nodes: tuple[NodeInfo, ...]
    """One for each slot."""
    memory: str = ""
    """Of this machine, as in `NodeInfo`."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The run cannot begin; the broker ends."""

    reason: str


class Status(msgspec.Struct, frozen=True, tag=True):
    """The state of a process."""

    name: str
    code: int | None
    """Its exit code; None while it runs."""
    cause: str
    """Why it ended, if its exit code does not say that: a lost node."""
    log_tail: str
    log: str
    """Where its log is; empty: not known yet."""
    node: NodeInfo | None = None
    """Where it is; None: not known yet."""
    node_lost: bool = False
    """It ended with its node, or there was none for it: no fault of its own."""


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """There is room for a joiner, or not."""

    slot: int
    reason: str
    """Why not; empty: there is."""


class HeadLost(msgspec.Struct, frozen=True, tag=True):
    """The head does not answer any more. The processes still run."""

    reason: str


FromBroker = Stage | Opened | Refused | Status | Reserved | HeadLost
TO_BROKER: Any = ToBroker
FROM_BROKER: Any = FromBroker
"""For `read_all`: a union is no type to a type checker."""


def write(file: BinaryIO, message: msgspec.Struct) -> None:
    """Write one message. Raises OSError if the other end is gone."""
    body = msgspec.msgpack.encode(message)
    file.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
    file.flush()


def read_all(file: BinaryIO, kind: Any) -> Iterator[Any]:
    """The messages of the other end until it closes or is killed."""
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)
    while len(head := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
        size = int.from_bytes(head, "little")
        body = file.read(size)
        if len(body) < size:
            return
        yield decoder.decode(body)
