"""Weights between nodes: processes on loopback TCP, and what deltas save.

    python -m benchmarks.weights --part chain --quick --json FILE

`tcp_vs_memcpy`: seconds until one receiver has 400 MB (encrypted; `tcp_plain_vs_memcpy` without),
over one copy in memory. `tree4_vs_one`: until four receivers have it, over one. All processes share
this machine's cores, so links are paced to a stated bandwidth for that ratio: then it says what the
chain does, not what the processor does; `tree4_vs_one_unpaced` is the other.
`delta_bytes_share`: see `benchmarks.weights_deltas`. The table of 7B and 32B is arithmetic: bytes
over bandwidth, and a chunk for each node in between.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.wire.weights.chunks import CHUNK_BYTES
from asyncrl.wire.weights.layout import SHARED_MEMORY
from asyncrl.wire.weights.writer import WeightPublisher
from benchmarks.weights_deltas import measure as measure_deltas
from benchmarks.weights_nodes import Answer, Link, Nodes, nodes

NBYTES = 400_000_000
PACE = 50_000_000.0
"""Bytes per second of a paced link: 0.4 Gbit/s."""
_CHANGED = 0.03
"""Share of the elements that differ between the versions of the measured delta."""
_SIZES = {"7B": 14e9, "32B": 64e9}
"""Bytes in bfloat16."""
_GIGABITS = (10, 25, 100)
_NODES = 16


def versions(nbytes: int) -> list[tuple[str, torch.Tensor]]:
    """A tensor of noise, and what makes a next version of it."""
    noise = np.random.default_rng(0).integers(0, 1 << 15, nbytes // 2, dtype=np.int16)
    return [("weights", torch.from_numpy(noise).view(torch.bfloat16))]


def memcpy_seconds(nbytes: int, repeats: int) -> float:
    source, target = (np.ones(nbytes, np.uint8) for _ in range(2))
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


class _Measurement:
    def __init__(self, nbytes: int, repeats: int) -> None:
        self._tensors = versions(nbytes)
        self._repeats = repeats
        self._publisher = WeightPublisher(SHARED_MEMORY, f"bench-chain-{id(self)}")
        self._version = 0

    def close(self) -> None:
        self._publisher.close()

    def seconds(
        self, chain: Nodes, count: int, *, deltas: bool = False, repeats: int | None = None
    ) -> dict[str, Any]:
        """Until `count` receivers have a version, median; the first two touch the memory."""
        found: list[float] = []
        answers: list[Answer] = []
        unmeasured = 0 if repeats else 2
        for _ in range((repeats or self._repeats) + unmeasured):
            taken, answers = chain.distribute(self._next(), count, deltas=deltas)
            found.append(taken)
        return {
            "seconds": statistics.median(found[unmeasured:]),
            "each": found,
            "bytes": [one.nbytes for one in answers],
            "parents_left": [one.left for one in answers],
        }

    def _next(self) -> Any:
        """Change every 33rd element, another one each time, and publish."""
        self._version += 1
        words = self._tensors[0][1].view(torch.int16)
        words[self._version :: round(1 / _CHANGED)] ^= 1
        return self._publisher.publish(self._tensors, self._version)


def arithmetic(share: float) -> list[dict[str, float | str]]:
    """Seconds by model and bandwidth until 1 and 16 nodes have a version."""
    rows: list[dict[str, float | str]] = []
    for model, nbytes in _SIZES.items():
        for gigabits in _GIGABITS:
            bandwidth = gigabits * 1e9 / 8
            behind = (_NODES - 1) * CHUNK_BYTES / bandwidth
            rows.append(
                {
                    "model": model,
                    "gigabits": gigabits,
                    "one_node_seconds": nbytes / bandwidth,
                    "sixteen_nodes_seconds": nbytes / bandwidth + behind,
                    "sixteen_nodes_delta_seconds": share * (nbytes / bandwidth + behind),
                    "sixteen_nodes_star_seconds": _NODES * nbytes / bandwidth,
                }
            )
    return rows


def measure(
    nbytes: int, repeats: int, steps: int, several: int, make_random: Callable[[Path], str]
) -> dict[str, Any]:
    """All numbers; seconds and bytes. `several` receivers are four, or fewer in a smoke."""
    run = _Measurement(nbytes, repeats)
    raw: dict[str, Any] = {
        "nbytes": nbytes,
        "memcpy_seconds": memcpy_seconds(nbytes, 5),
        "paced_bytes_per_second": PACE,
    }
    try:
        with nodes(several, Link()) as chain:
            raw["four"] = run.seconds(chain, several)
            raw["one"] = run.seconds(chain, 1)
            raw["one_delta"] = run.seconds(chain, 1, deltas=True)
        with nodes(1, Link(encrypted=False)) as chain:
            raw["one_plain"] = run.seconds(chain, 1)
        with nodes(several, Link(bytes_per_second=PACE)) as chain:
            raw["four_paced"] = run.seconds(chain, several, repeats=1)
            raw["one_paced"] = run.seconds(chain, 1, repeats=1)
    finally:
        run.close()
    raw["deltas"] = measure_deltas(make_random, steps)
    raw["arithmetic"] = arithmetic(ratios_of(raw)["delta_bytes_share"])
    return raw


def ratios_of(raw: dict[str, Any]) -> dict[str, float]:
    """Of what `measure` gives. The share is that of the worst step of the worse model."""

    def seconds(name: str) -> float:
        return float(raw[name]["seconds"])

    return {
        "tcp_vs_memcpy": seconds("one") / raw["memcpy_seconds"],
        "tcp_plain_vs_memcpy": seconds("one_plain") / raw["memcpy_seconds"],
        "tree4_vs_one": seconds("four_paced") / seconds("one_paced"),
        "tree4_vs_one_unpaced": seconds("four") / seconds("one"),
        "delta_vs_whole_seconds": seconds("one_delta") / seconds("one"),
        "delta_bytes_share": max(max(one["shares"]) for one in raw["deltas"].values()),
    }


def print_table(raw: dict[str, Any], ratios: dict[str, float]) -> None:
    size = raw["nbytes"] / 1e6
    print(f"{size:.0f} MB over loopback TCP, seconds until all receivers have it")
    print(f"  {'a copy in memory':32} {raw['memcpy_seconds']:8.3f}")
    for name, what in (
        ("one", "1 receiver, encrypted"),
        ("one_plain", "1 receiver, not encrypted"),
        ("one_delta", f"1 receiver, delta ({_CHANGED:.0%} changed)"),
        ("four", "4 receivers in a chain"),
        ("one_paced", f"1 receiver, {raw['paced_bytes_per_second'] / 1e6:.0f} MB/s links"),
        ("four_paced", "4 receivers, same links"),
    ):
        one = raw[name]
        print(f"  {what:32} {one['seconds']:8.3f}   {max(one['bytes']) / 1e6:8.1f} MB each")
    for name, one in raw["deltas"].items():
        shares = ", ".join(f"{share:.3f}" for share in one["shares"])
        print(
            f"delta over whole, {name} model of {one['parameters'] / 1e6:.1f}M (weights' standard "
            f"deviation {one['standard_deviation']:.3f}), step by step: {shares}"
        )
    print("arithmetic, seconds: model, Gbit/s, 1 node, 16 nodes, 16 nodes by deltas, 16 by a star")
    for row in raw["arithmetic"]:
        cells = [value for value in row.values() if isinstance(value, float)]
        print(f"  {row['model']:4} {row['gigabits']:4}" + "".join(f"{c:10.2f}" for c in cells))
    for ratio, value in ratios.items():
        print(f"{ratio:28} {value:.3f}")
