"""What a run needs of the nodes of a Ray cluster, and why a cluster is refused. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec

from asyncrl.launch.nodes import NodeInfo, unfit


class Slot(msgspec.Struct, frozen=True):
    """The place of one process and its replacements: one bundle of the placement group."""

    name: str
    """Of the process: "trainer", "trainer-1", "generator-0"."""
    cpus: float
    gpus: int = 0
    gpus_are_optional: bool = False
    """Whether it takes none where the cluster has none (`device: auto`)."""
    resources: dict[str, float] = {}

    def bundle(self) -> dict[str, float]:
        """As Ray has it."""
        gpus = {"GPU": float(self.gpus)} if self.gpus else {}
        return {"CPU": self.cpus} | gpus | self.resources


def without_missing_gpus(slots: Sequence[Slot], total: Mapping[str, float]) -> tuple[Slot, ...]:
    """The slots, where GPUs are optional without them if the cluster has none."""
    if total.get("GPU", 0.0) > 0:
        return tuple(slots)
    return tuple(
        msgspec.structs.replace(slot, gpus=0) if slot.gpus_are_optional else slot for slot in slots
    )


def shortage(
    slots: Sequence[Slot], nodes: Sequence[Mapping[str, float]], strategy: str
) -> str | None:
    """Why the slots can never fit these nodes; None: they may.

    Args:
        slots: of the run.
        nodes: the resources of each living node.
        strategy: `launcher.ray.strategy`.
    """
    needed: dict[str, float] = {}
    for slot in slots:
        for key, amount in slot.bundle().items():
            needed[key] = needed.get(key, 0.0) + amount
            if not any(node.get(key, 0.0) >= amount for node in nodes):
                return (
                    f"{slot.name} needs {_listed(slot.bundle())} on one node, and no node of the "
                    f"Ray cluster has {amount:g} {_unit(key)}: {_each(nodes)}. {_remedy(key)}"
                )
    for key, amount in needed.items():
        has = sum(node.get(key, 0.0) for node in nodes)
        if has < amount:
            return (
                f"the run needs {_listed(needed)}, and the Ray cluster has {has:g} {_unit(key)} in "
                f"all: {_each(nodes)}. {_remedy(key)}"
            )
    if strategy == "strict_spread" and len(nodes) < len(slots):
        return (
            f"launcher.ray.strategy: strict_spread needs a node for each of {len(slots)} "
            f"processes, and the Ray cluster has {len(nodes)}; use spread, or add nodes"
        )
    return None


def _each(nodes: Sequence[Mapping[str, float]]) -> str:
    shown = [
        _listed({key: node.get(key, 0.0) for key in ("CPU", "GPU") if node.get(key)}) or "nothing"
        for node in nodes[:8]
    ]
    more = f", and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    return f"its {len(nodes)} node(s) have " + "; ".join(shown) + more


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {_unit(key)}" for key, amount in resources.items())


def _unit(key: str) -> str:
    return {"CPU": "CPU(s)", "GPU": "GPU(s)"}.get(key, f"of {key!r}")


def _remedy(key: str) -> str:
    ways = {
        "CPU": "Lower launcher.generators or launcher.ray.generator.cpus, or add nodes",
        "GPU": (
            "Lower launcher.generators or tensor_parallel_size of the engine, add nodes, or set "
            "engine.device and trainer.device to cpu"
        ),
    }
    return ways.get(key, "Start a node with `ray start --resources`, or ask for another")


def refusal(
    slots: Sequence[Slot],
    nodes: Sequence[NodeInfo],
    *,
    python: str,
    asyncrl: str,
    run_directory: str,
    model: str,
    bind_address: str = "",
) -> str | None:
    """Why the run cannot begin on these nodes; None: it can.

    Args:
        slots: of the run.
        nodes: where each slot is.
        python: version of this process.
        asyncrl: version of this process.
        run_directory: of the run.
        model: the folder of its model.
        bind_address: of this machine, where the controller listens.
    """
    for slot, node in zip(slots, nodes, strict=True):
        reason = unfit(slot.name, node, python=python, asyncrl=asyncrl, model=model)
        if reason is not None:
            return reason
        if node.unreachable:
            return (
                f"{slot.name} would run on node {node}, from where this machine cannot be reached "
                f"at {bind_address}: {node.unreachable}. Open the firewall for connections between "
                "the nodes (the system chooses the ports), or set launcher.ray.bind_address to "
                "another address of this machine"
            )
        if slot.name.startswith("trainer") and not node.shares_run_directory:
            return (
                f"{slot.name} would run on node {node}, which does not see this run's folder "
                f"{run_directory}, where it writes checkpoints; set run.directory to a folder that "
                "both share, or keep the trainer on machines that see it with "
                "launcher.ray.trainer.resources"
            )
    return None


def node_info(text: str) -> NodeInfo:
    """What an actor answered, JSON."""
    return msgspec.convert(json.loads(text), NodeInfo)
