"""The nodes of a run: what each has, which of them are one machine, and which are unfit. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncrl.trainer.base.rank_network import apart, is_loopback


class NodeInfo(msgspec.Struct, frozen=True):
    """What was found on a node."""

    id: str
    """Ray's, or the agent's name."""
    ip: str
    hostname: str
    memory: str
    """Names the memory that the processes of a machine share; equal on two nodes if they share
    it."""
    python: str
    """Major and minor version."""
    asyncrl: str
    """Version and digest of the code; empty: it cannot be imported."""
    shares_run_directory: bool
    has_model: bool
    disk: str = ""
    """Names its folder of temporary files, where those of a run are that it does not share."""

    def __str__(self) -> str:
        return f"{self.ip} ({self.hostname})"

    @property
    def shared(self) -> tuple[str, str]:
        """Its memory, and where the run's files are; equal on two nodes that share both."""
        return self.memory, "" if self.shares_run_directory else self.disk


class Machines:
    """Which nodes are one machine, and so one node to a run: they share memory and the run's files.

    Args:
        home: the memory of the controller's machine.
        nodes: that the run begins on.
        always: every node is a machine of its own.
    """

    def __init__(self, home: str, nodes: Sequence[NodeInfo], *, always: bool) -> None:
        self._always = always
        self._names: dict[tuple[str, str], str] = {}
        """The first node that was seen with a memory and files, by them."""
        self._home = (home, "")
        for node in nodes:
            self.note(node)

    def note(self, node: NodeInfo) -> None:
        """A process of the run is on this node."""
        self._names.setdefault(node.shared, node.id)

    def name_of(self, node: NodeInfo) -> str:
        """The id of this node, or that of the first one that shares its memory."""
        return node.id if self._always else self._names.get(node.shared, node.id)

    @property
    def are_several(self) -> bool:
        """Whether the run's processes, the controller among them, are on several machines."""
        return self._always or len(self._names.keys() | {self._home}) > 1


def ranks_apart(nodes: Sequence[NodeInfo], network: str) -> str | None:
    """Why the ranks of a trainer cannot speak to each other; None: they can.

    Args:
        nodes: of the ranks.
        network: `trainer.rank_network`.
    """
    elsewhere = next((node for node in nodes if node.ip != nodes[0].ip), None)
    if elsewhere is None or not is_loopback(network):
        return None
    where = f"the trainer's ranks would be on several machines, {nodes[0]} and {elsewhere}"
    return apart(where, network)


def unfit(process: str, node: NodeInfo, *, python: str, asyncrl: str, model: str) -> str | None:
    """Why a process cannot run on a node; None: it can.

    Args:
        process: name of the process.
        node: where it would be.
        python: version of the controller's.
        asyncrl: version of the controller's.
        model: the folder of the run's model.
    """
    if node.python != python:
        return (
            f"{process} would run on node {node} with Python {node.python}, and this is "
            f"Python {python}; install the same on every node"
        )
    if node.asyncrl != asyncrl:
        has = f"asyncrl {node.asyncrl}" if node.asyncrl else "no asyncrl"
        return (
            f"{process} would run on node {node}, which has {has}, and this is asyncrl "
            f"{asyncrl}; install the same on every node, or use one image for all"
        )
    if not node.has_model:
        return (
            f"{process} would run on node {node}, where the model's folder {model} does not "
            "exist; put it on a file system that all nodes share, or copy it there"
        )
    return None
