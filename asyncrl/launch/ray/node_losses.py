"""Whether a process was lost with its node: a machine that is taken away is no fault of it.

    an end that nobody asked for ──► held ──► the head's next list of nodes ──► is its node gone?

Ray may tell the end of an actor, or an actor the end of its child, before the head knows that the
node is gone. So such an end is held for a moment. Pure; the list comes from the thread that watches
the head.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from asyncrl.launch.ray.messages import Status

NODE_SECONDS = 3.0
"""Time for the head to find out that a node is gone."""
LONGEST_SECONDS = 15.0
"""Longest time for which an end is held, if the head says nothing."""
_TERMINATED = (0, -signal.SIGTERM, 128 + signal.SIGTERM)


class Losses:
    """Ends that nobody asked for, until it is known whether their nodes are gone."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[float, Status]] = {}
        self._answer = float("-inf"), frozenset[str]()
        """When the head was asked last, and the living nodes; one value, as a thread sets it."""

    def note(self, asked: float, nodes: Iterable[Mapping[str, Any]]) -> frozenset[str]:
        """Take the head's list (`ray.nodes`); returns the ids of the living ones.

        Args:
            asked: when it was asked for (monotonic seconds).
            nodes: all of the cluster.
        """
        alive = frozenset(node["NodeID"] for node in nodes if node["Alive"])
        self._answer = asked, alive
        return alive

    def hold(self, end: Status, now: float) -> bool:
        """Keep an end until `settled` gives it back; False: it is not one of a lost node.

        An actor is lost with its node, and a child gets SIGTERM if its machine is shut down.
        """
        is_actors = end.code == -signal.SIGKILL and bool(end.cause)
        if end.node is None or not (is_actors or end.code in _TERMINATED):
            return False
        self._held[end.name] = now, end
        return True

    def settled(self, now: float, *, head_is_lost: bool = False) -> list[Status]:
        """Ends of which it is known now whether it was the node's, each once.

        Without a head nobody will know it: the end is told at once.
        """
        found = []
        asked, alive = self._answer
        for at, end in list(self._held.values()):
            gone = asked >= at and end.node is not None and end.node.id not in alive
            waited = now - at
            known = gone or (asked >= at and waited > NODE_SECONDS)
            if known or head_is_lost or waited > LONGEST_SECONDS:
                del self._held[end.name]
                found.append(_with_its_node(end) if gone else end)
        return found

    def release(self, name: str) -> Status | None:
        """An end that is to be told as it is; None if none of this name is held."""
        return self._held.pop(name, (0.0, None))[1]


def _with_its_node(end: Status) -> Status:
    cause = f"its node left the Ray cluster{end.cause and f': {end.cause}'}"
    return replace(end, cause=cause, node_lost=True)
