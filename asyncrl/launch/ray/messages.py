"""Messages between the controller and its Ray driver, one line of JSON each; a run's bundles. Pure.

The controller does not import Ray: the driver (`asyncrl.launch.ray.driver`) is a separate process.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class Slot(msgspec.Struct, frozen=True):
    """The place of one process and its replacements: one bundle, with one agent."""

    name: str
    """Name of the process and of its agent: "trainer", "trainer-1", "generator-0"."""
    cpus: float
    gpus: int = 0
    gpus_are_optional: bool = False
    """True if it does without on a cluster that lacks GPUs (`device: auto`)."""
    resources: dict[str, float] = {}

    @property
    def role(self) -> str:
        """The role of its agent."""
        return "trainer" if self.name.startswith("trainer") else "generator"

    def bundle(self) -> dict[str, float]:
        """Return the resources as Ray names them."""
        gpus = {"GPU": float(self.gpus)} if self.gpus else {}
        return {"CPU": self.cpus} | gpus | self.resources


class Open(msgspec.Struct, frozen=True, tag=True):
    """Connect, and reserve room for the agents."""

    address: str | None
    slots: tuple[Slot, ...]
    strategy: str
    runtime_env: dict[str, Any]
    connect_seconds: float
    place_seconds: float


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Start an agent in every slot, and in those that are reserved later."""

    controller: str
    """`HOST:PORT` at which the controller waits for agents."""
    secret: bytes

    def __repr__(self) -> str:  # without the secret
        return f"Serve({self.controller!r})"


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Find room for a generator that joins, and start its agent. Answered by `Reserved`."""

    slot: Slot
    seconds: float


class GiveBack(msgspec.Struct, frozen=True, tag=True):
    """Release the slot of a generator that joined; those of the run's start stay reserved."""

    name: str


class Stage(msgspec.Struct, frozen=True, tag=True):
    """The driver begins to wait for something."""

    what: str
    seconds: float
    """A longer wait means that it hangs."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """Room for every agent is reserved."""

    address: str
    """Address of the head."""
    node_ip: str
    """Address by which Ray knows this machine."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The run cannot begin."""

    reason: str


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The agent of a slot has ended; another one is being started."""

    name: str
    cause: str


class NodeLeft(msgspec.Struct, frozen=True, tag=True):
    """A node has left the cluster, with all processes on it."""

    node: str
    """Ray's id of it."""


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Reserve`."""

    name: str
    reason: str
    """The reason of too little room; empty if it is reserved."""


class HeadLost(msgspec.Struct, frozen=True, tag=True):
    """The cluster is lost."""

    reason: str
    agents_too: bool
    """True if Ray has ended the agents; otherwise they still run."""


ToDriver = Open | Serve | Reserve | GiveBack
FromDriver = Stage | Opened | Refused | Lost | NodeLeft | Reserved | HeadLost
_UNIONS: Any = ToDriver, FromDriver  # a type checker does not take a union for a type
TO_DRIVER: msgspec.json.Decoder[ToDriver] = msgspec.json.Decoder(_UNIONS[0])
FROM_DRIVER: msgspec.json.Decoder[FromDriver] = msgspec.json.Decoder(_UNIONS[1])


def line(message: ToDriver | FromDriver) -> bytes:
    """Encode a message."""
    return msgspec.json.encode(message) + b"\n"


def without_missing_gpus(slots: Sequence[Slot], total: Mapping[str, float]) -> tuple[Slot, ...]:
    """Return the slots; optional GPUs are dropped if the cluster has none."""
    if total.get("GPU", 0.0) > 0:
        return tuple(slots)
    return tuple(
        msgspec.structs.replace(slot, gpus=0) if slot.gpus_are_optional else slot for slot in slots
    )


def shortage(
    slots: Sequence[Slot], nodes: Sequence[Mapping[str, float]], strategy: str
) -> str | None:
    """Return why the slots can never fit, given each living node's resources; None if they may."""
    needed: dict[str, list[float]] = {}
    for slot in slots:
        for key, amount in slot.bundle().items():
            needed.setdefault(key, []).append(amount)
    for key, amounts in needed.items():
        has = [node.get(key, 0.0) for node in nodes]
        if sum(amounts) > sum(has) or max(amounts) > max(has, default=0.0):
            each = f", {max(amounts):g} of them on one node," if len(amounts) > 1 else ""
            return (
                f"the run needs {sum(amounts):g} {key}{each} and the Ray cluster has "
                f"{sum(has):g} {key} in all, at most {max(has, default=0.0):g} on a node: add "
                "nodes (`ray start --address=HOST:PORT`), or lower launcher.generators, "
                "launcher.ray.generator and .trainer, or tensor_parallel_size of the engine; "
                "engine.device and trainer.device: cpu need no GPU"
            )
    if strategy == "strict_spread" and len(nodes) < len(slots):
        return (
            f"launcher.ray.strategy: strict_spread needs a node for each of {len(slots)} "
            f"processes, and the Ray cluster has {len(nodes)}; use spread, or add nodes"
        )
    return None
