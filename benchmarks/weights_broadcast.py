"""Weights by broadcast: one sender and receivers in processes of their own, gloo over loopback TCP.

    python -m benchmarks.weights --part broadcast --quick --json FILE

`broadcast_vs_memcpy`: seconds until one receiver has 400 MB in its own memory, over one copy in
memory. `broadcast4_vs_one`: until four have it, over one; all processes share this machine's
cores. `broadcast_vs_file`: four by broadcast, over the same four reading the published file, which
is what a run on one machine does. NCCL is not measured.
"""

import statistics
import time
from contextlib import closing
from typing import Any

from rich.table import Table

from asyncrl.wire.weights.broadcast.sending import WeightSender
from asyncrl.wire.weights.layout import SHARED_MEMORY, Outcome, WeightManifest
from asyncrl.wire.weights.writer import WeightPublisher
from benchmarks.harness import table
from benchmarks.weights_chain import memcpy_seconds, versions
from benchmarks.weights_nodes import Child, Fetch, Role


class Receivers:
    """Processes that read what they are told."""

    def __init__(self, count: int) -> None:
        self._children = [Child() for _ in range(count)]
        self._all_do(Role("reader"))

    def seconds(self, manifest: WeightManifest) -> float:
        """Until all have the version in their own memory."""
        began = time.perf_counter()
        self._all_do(Fetch(manifest))
        return time.perf_counter() - began

    def _all_do(self, order: Role | Fetch) -> None:
        for child in self._children:
            child.tell(order)
        for child in self._children:
            child.answer()

    def close(self) -> None:
        for child in self._children:
            child.close()


def measure_receivers(count: int, nbytes: int, repeats: int) -> dict[str, Any]:
    """Seconds by broadcast and by file, in turns; medians. The first two touch the memory."""
    tensors, found = versions(nbytes), {"broadcast": list[float](), "file": list[float]()}
    outcomes: list[Outcome] = []
    with (
        closing(Receivers(count)) as receivers,
        closing(Receivers(count)) as readers,
        WeightPublisher(SHARED_MEMORY, f"bench-broadcast-{id(found)}") as publisher,
        closing(WeightSender("127.0.0.1", members=count, note=outcomes.append)) as sender,
    ):
        for version in range(1, repeats + 3):
            manifest = publisher.publish(tensors, version)
            found["file"].append(readers.seconds(manifest))
            found["broadcast"].append(receivers.seconds(sender.publish(manifest)))
    if outcomes != ["whole"] * (repeats + 2):
        raise RuntimeError(f"a broadcast failed: {outcomes}")
    return {name: statistics.median(each[2:]) for name, each in found.items()} | {"each": found}


def measure(nbytes: int, repeats: int, *, four: bool = True) -> dict[str, Any]:
    one = measure_receivers(1, nbytes, repeats)
    return {
        "nbytes": nbytes,
        "memcpy_seconds": memcpy_seconds(nbytes, 5),
        "one": one,
        "four": measure_receivers(4, nbytes, repeats) if four else one,
    }


def ratios_of(raw: dict[str, Any]) -> dict[str, float]:
    return {
        "broadcast_vs_memcpy": raw["one"]["broadcast"] / raw["memcpy_seconds"],
        "broadcast4_vs_one": raw["four"]["broadcast"] / raw["one"]["broadcast"],
        "broadcast_vs_file": raw["four"]["broadcast"] / raw["four"]["file"],
    }


def table_of(raw: dict[str, Any]) -> Table:
    rows = [["a copy in memory", raw["memcpy_seconds"]]]
    rows += [
        [f"{n}, by {way}", raw[n][way]] for n in ("one", "four") for way in ("file", "broadcast")
    ]
    title = f"{raw['nbytes'] / 1e6:.0f} MB on one machine, until all receivers have it"
    return table(title, "what,seconds", rows)
