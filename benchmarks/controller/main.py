"""What the controller costs: CPU time of its process, per sample and per event of a sample.

    python -m benchmarks.controller [--part samples|relays] [--quick] [--json FILE]

The controller is the real one (hub, decoding, inbox, scheduler, commands), without the live view.
Generators and trainer are on real sockets in another process and compute nothing
(`benchmarks.controller.peers`). Mode `verify`: each sample is started, finished, verified once,
finished again, delivered and acknowledged. Measured is the CPU time of all threads of the
controller's process, ZeroMQ's thread with its encryption included, from the first step to the last.

`--part samples`: two generators of 256 rows. `ending together` is the number of samples that end at
one step of an engine: 1 where answers are long, whole groups where many answers are short. `alone`:
every message in a frame of its own, as before frames could carry several (`wire.transport.outbox`).
Both are measured in turns.

`--part relays`: 64 generators of 64 rows, whose samples end one by one, connected over loopback TCP
themselves or through relays of eight, with CURVE and, in this benchmark only, without. The peers
share the other core and send as fast as they can. An event is a finished or delivered sample; the
commands that follow from it are part of its cost. `control_messages_per_s` is how many events one
core carries, all threads together. `_paced`: the same at some 1,200 events a second, when the
process wakes up for each frame.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.controller.measured import Cost, Load, measure
from benchmarks.controller.peers import SLOTS
from benchmarks.report import add_smoke, write_json

GENERATORS = 2
TARGET = 25_000
"""Events a second on one core."""
PACED_TICK = 0.1
"""Seconds between two samples of a generator, where the controller has little to do."""

Measured = tuple[list[Table], list[Cost], dict[str, float]]


class Effort(NamedTuple):
    samples: tuple[int, int]
    """Steps and repeats of this part."""
    relays: tuple[int, int]
    rows: int = SLOTS
    many: int = 64
    """Generators, and rows of each, of the part with relays."""


QUICK, FULL = Effort((4, 1), (2, 1)), Effort((10, 3), (4, 3))
SMOKE = Effort((1, 1), (1, 1), rows=32, many=8)


def samples_part(effort: Effort) -> Measured:
    """Two generators, in frames of one message and of several."""
    steps, repeats = effort.samples
    costs = [
        measure(Load(GENERATORS, effort.rows, together, batched=batched), steps=steps)
        for _ in range(repeats)
        for together in (1, 8, 32)
        for batched in (False, True)
    ]
    table = Table(
        title=f"controller: {GENERATORS} generators of {effort.rows} rows, µs of CPU / sample"
    )
    for title in ("ending together", "alone", "in frames of several", "samples/s measured at"):
        table.add_column(title, justify="right")
    ratios: dict[str, float] = {}
    for together in (1, 8, 32):
        per, rate = {}, 0.0
        for batched in (False, True):
            of = [c for c in costs if (c.load.together, c.load.batched) == (together, batched)]
            per[batched] = statistics.median(c.us_per_sample for c in of)
            rate = statistics.median(c.samples / c.seconds for c in of)
        table.add_row(str(together), f"{per[False]:.0f}", f"{per[True]:.0f}", f"{rate:.0f}")
        ratios[f"controller_us_per_sample_{together}"] = per[True]
        ratios[f"controller_alone_over_together_{together}"] = per[False] / per[True]
    return [table], costs, ratios


def relays_part(effort: Effort) -> Measured:
    """Many generators, connected themselves and through relays."""
    (steps, repeats), many = effort.relays, effort.many
    fast = {
        (relayed, curve): Load(many, many, per_relay=8 if relayed else 0, tcp=True, curve=curve)
        for relayed in (False, True)
        for curve in (True, False)
    }
    paced = [replace(fast[relayed, True], tick=PACED_TICK) for relayed in (False, True)]
    costs = [measure(load, steps=steps) for _ in range(repeats) for load in fast.values()]
    costs += [measure(load, steps=1) for load in paced]
    table = Table(title=f"controller: {many} generators of {many} rows over TCP, µs of CPU / event")
    for title in ("connected", "CURVE", "all", "main thread", "events/s on one core",
                  "events/s measured at"):  # fmt: skip
        table.add_column(title, justify="right")
    ratios: dict[str, float] = {}
    for load in (*fast.values(), *paced):
        of = [cost for cost in costs if cost.load == load]
        rate = statistics.median(cost.events_per_s for cost in of)
        table.add_row(
            "through relays of 8" if load.per_relay else "themselves",
            "on" if load.curve else "off",
            f"{statistics.median(cost.us_per_event for cost in of):.1f}",
            f"{statistics.median(1e6 * cost.main_seconds / cost.events for cost in of):.1f}",
            f"{rate:,.0f}",
            f"{statistics.median(cost.events / cost.seconds for cost in of):,.0f}",
        )
        name = "control_messages_per_s" + ("" if load.per_relay else "_direct")
        name += ("" if load.curve else "_plain") + ("_paced" if load in paced else "")
        ratios[name] = rate
    return [table], costs, ratios


PARTS = {"samples": samples_part, "relays": relays_part}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps and repeats")
    parser.add_argument("--part", choices=PARTS, help="only this part")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    add_smoke(parser)
    args = parser.parse_args(arguments)
    effort = SMOKE if args.smoke else QUICK if args.quick else FULL
    console, runs, ratios = Console(), [], {}
    for part in (args.part,) if args.part else PARTS:
        tables, costs, found = PARTS[part](effort)
        for table in tables:
            console.print(table)
        runs += costs
        ratios |= found
    console.print({name: round(value, 2) for name, value in ratios.items()})
    if args.json:
        raw: dict[str, Any] = {"runs": [cost.record() for cost in runs], "target": TARGET}
        write_json(args.json, "controller", raw, ratios, smoke=args.smoke)
