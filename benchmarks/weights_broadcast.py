"""Weights by broadcast: one sender and receivers in processes of their own, gloo over loopback TCP.

    python -m benchmarks.weights --part broadcast --quick --json FILE

`broadcast_vs_memcpy`: seconds until one receiver has 400 MB in its own memory, over one copy in
memory. `broadcast4_vs_one`: until four have it, over one; all processes share this machine's
cores. `broadcast_vs_file`: four by broadcast, over the same four reading the published file, which
is what a run on one machine does. NCCL is not measured.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import Any

import msgspec
from rich.table import Table

from asyncrl.wire.weights.broadcast.sending import WeightSender
from asyncrl.wire.weights.layout import SHARED_MEMORY, Outcome, WeightManifest
from asyncrl.wire.weights.writer import WeightPublisher
from benchmarks.harness import table
from benchmarks.weights_chain import memcpy_seconds, versions

_LIMIT_SECONDS = 150.0


class Receivers:
    """Processes that read what they are told."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-m", "benchmarks.weights_receiver"]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(count)
        ]
        for process in self._processes:
            _answer(process)

    def seconds(self, manifest: WeightManifest) -> float:
        """Until all have the version in their own memory."""
        line = msgspec.json.encode(manifest) + b"\n"
        began = time.perf_counter()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        for process in self._processes:
            _answer(process)
        return time.perf_counter() - began

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


def _answer(process: subprocess.Popen[bytes]) -> None:
    """A process that says nothing in time is killed, which ends the wait for its line."""
    assert process.stdout is not None
    late = threading.Timer(_LIMIT_SECONDS, process.kill)
    late.start()
    line = process.stdout.readline()
    late.cancel()
    if not line:
        raise RuntimeError(f"a receiver ended, or did not answer in {_LIMIT_SECONDS:g} s")


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
