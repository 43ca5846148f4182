"""The actor of one process of a run: starts it on its node, and watches it.

The class is sent to the workers by value, with `asyncrl.launch.node_child`, so it says what is
wrong even on a node that has another asyncrl or none. Therefore these two modules import the
standard library only.
"""

from __future__ import annotations

import json
import os

from asyncrl.launch.node_child import NodeChild, Place, cannot_reach, node_facts


class ProcessActor:
    """Runs in a Ray worker, with several threads: a call that waits does not delay the others."""

    def __init__(self) -> None:
        self._child = NodeChild()

    def describe(self, question: str) -> str:
        """About this node: a `NodeInfo` as JSON.

        Args:
            question: JSON: token_file, token, model, weights_directory, probe (where the
                controller's machine listens, HOST:PORT).
        """
        asked = json.loads(question)
        node, ip, gpus = _place()
        facts = node_facts(asked) | {
            "id": node,
            "ip": ip,
            "gpus": len(gpus),
            "unreachable": cannot_reach(asked["probe"]),
        }
        return json.dumps(facts)

    def start(self, order: str, keys: bytes) -> str:
        """As `NodeChild.start`."""
        node, ip, gpus = _place()
        return self._child.start(order, keys, Place(node, ip, gpus))

    def watch(self, seconds: float) -> tuple[int | None, str]:
        """As `NodeChild.watch`."""
        return self._child.watch(seconds)

    def leave(self) -> None:
        """End this worker, also where no head is left that could."""
        os._exit(0)

    def end(self, by_force: bool) -> None:
        """As `NodeChild.end`."""
        self._child.end(by_force)


def _place() -> tuple[str, str, list[str]]:
    """Id and address of this node, and the GPUs that Ray gave to this actor."""
    import ray

    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    return context.get_node_id(), str(ray.util.get_node_ip_address()), [str(gpu) for gpu in gpus]
