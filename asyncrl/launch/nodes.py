"""The nodes of a run: facts, which of them are one machine, and which are unfit. Pure."""

from collections.abc import Sequence

import msgspec

from asyncrl.trainer.base.rank_network import apart, is_loopback


class NodeInfo(msgspec.Struct, frozen=True):
    """Facts about a node."""

    id: str
    """Ray's id, or the agent's name."""
    ip: str
    hostname: str
    memory: str
    """Identifies the memory that a machine's processes share; equal on two nodes that share it."""
    python: str
    asyncrl: str
    """Version and digest of the code; empty if it cannot be imported."""
    shares_run_directory: bool
    has_model: bool
    disk: str = ""
    """Identifies its folder of temporary files, which holds a run's files that are not shared."""

    def __str__(self) -> str:
        return f"{self.ip} ({self.hostname})"

    @property
    def shared(self) -> tuple[str, str]:
        """Identifies memory and location of the run's files; equal on two nodes that share both."""
        return self.memory, "" if self.shares_run_directory else self.disk


class Machines:
    """Merges nodes that share memory and a run's files, unless `always` separates them."""

    def __init__(self, home: str, nodes: Sequence[NodeInfo], *, always: bool) -> None:
        self._always = always
        self._names: dict[tuple[str, str], str] = {}
        """The first node seen with each memory and files."""
        self._home = (home, "")
        for node in nodes:
            self.note(node)

    def note(self, node: NodeInfo) -> None:
        """Note that a process of the run is on this node."""
        self._names.setdefault(node.shared, node.id)

    def name_of(self, node: NodeInfo) -> str:
        """Return the id of this node, or that of the first one that shares its memory."""
        return node.id if self._always else self._names.get(node.shared, node.id)

    @property
    def are_several(self) -> bool:
        """True if the run's processes, including the controller, are on several machines."""
        return self._always or len(self._names.keys() | {self._home}) > 1


def ranks_apart(nodes: Sequence[NodeInfo], network: str) -> str | None:
    """Say why ranks on these nodes cannot reach each other; None if they can."""
    elsewhere = next((node for node in nodes if node.ip != nodes[0].ip), None)
    if elsewhere is None or not is_loopback(network):
        return None
    where = f"the trainer's ranks would be on several machines, {nodes[0]} and {elsewhere}"
    return apart(where, network)


def unfit(process: str, node: NodeInfo, ours: NodeInfo, model: str) -> str | None:
    """Say why a process cannot run on a node; None if it can. `ours` is the controller's."""
    if node.python != ours.python:
        return (
            f"{process} would run on node {node} with Python {node.python}, and the controller "
            f"has Python {ours.python}; install the same on every node"
        )
    if node.asyncrl != ours.asyncrl:
        return (
            f"{process} would run on node {node}, which has asyncrl {node.asyncrl or '(none)'}, "
            f"and the controller has asyncrl {ours.asyncrl}; install the same on every node, or "
            "use one image for all"
        )
    if not node.has_model:
        return (
            f"{process} would run on node {node}, where the model's folder {model} does not "
            "exist; put it on a file system that all nodes share, or copy it there"
        )
    return None
