"""What it costs to bring a finished trajectory from its generator to the trainer.

    python -m benchmarks.delivery [--quick] [--json FILE]

Six paths run in turns in one process, with trajectories of 64 to 32,000 tokens:

    bare     encode the message, decode it
    digest   bare, and the digest twice: for the generator's report and in the trainer
    checks   digest, and the trainer's intake: order, report, all that training needs
    ipc      bare, over an ipc socket without CURVE
    curve    bare, over `Line` and `Hub`, which use CURVE
    whole    checks over `Line` and `Hub`: what a run does

The times are CPU time of all threads in the cheapest round, so that other work on the machine
counts little; wall time is printed too. The floor is what `whole` cannot avoid: to encrypt and
decrypt the bytes (libsodium's own speed), to digest them twice, and to copy them twice.

Then another process sends, and this one takes in as a rank of the trainer does: receive, compare,
queue, acknowledge. ZeroMQ's thread decrypts, the main thread does the rest. With a core for each,
the busier one limits the rank. `--part intake` does this only, over loopback TCP too: trajectories
alone and as the groups of eight in which a generator sends them, with CURVE and, in this benchmark
only, without. `intake_mb_per_s` is what arrives, is compared and is acknowledged in a second.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.delivery.ends import GROUP, delivery_of, trajectory_of
from benchmarks.delivery.paths import PATHS, compare_paths, floor, stages
from benchmarks.delivery.rank import Rank, Way, take_in
from benchmarks.report import add_smoke, write_json

TOKENS = (64, 1_000, 8_000, 32_000)
NEEDED_PER_S = 12_800
"""Samples per second of 1,000 GPUs with 256 samples in flight each, of 20 s (architecture.md)."""


class Effort(NamedTuple):
    rounds: int
    megabytes: float
    """That each path delivers in each round, but at most 400 trajectories."""
    lengths: tuple[int, ...] = TOKENS


QUICK, FULL, SMOKE = Effort(12, 3.0), Effort(40, 20.0), Effort(1, 0.001, TOKENS[:1])


@dataclass(frozen=True)
class Result:
    """Measurements of one length; all times in microseconds per trajectory."""

    tokens: int
    size: int
    """Bytes of its message."""
    cpu_us: dict[str, float]
    """By path: CPU time in its cheapest round."""
    wall_us: dict[str, float]
    """By path: wall time in its fastest round."""
    median_us: dict[str, float]
    """By path: the median of the CPU time of all rounds."""
    stage_us: dict[str, float]
    floor_parts_us: dict[str, float]
    """What the path needs twice, once each."""
    rank: Rank

    @property
    def floor_us(self) -> float:
        """CPU time that the whole path cannot avoid."""
        return 2 * sum(self.floor_parts_us.values())

    @property
    def ranks_needed(self) -> float:
        """Ranks of the trainer that take in what 1,000 GPUs generate."""
        return NEEDED_PER_S / self.rank.per_s


def measure(tokens: int, effort: Effort) -> Result:
    rounds = effort.rounds
    trajectory = trajectory_of(tokens)
    size = len(msgspec.msgpack.encode(delivery_of(trajectory)))
    repeats = max(2, min(400, int(effort.megabytes * 1e6 / size)))
    times = asyncio.run(compare_paths(trajectory, repeats=repeats, rounds=rounds))
    return Result(
        tokens,
        size,
        cpu_us={name: min(cpu for _, cpu in each) for name, each in times.items()},
        wall_us={name: min(wall for wall, _ in each) for name, each in times.items()},
        median_us={name: statistics.median(cpu for _, cpu in each) for name, each in times.items()},
        stage_us=stages(trajectory, repeats, rounds),
        floor_parts_us=floor(size, repeats, rounds),
        rank=take_in(tokens, count=max(2 * GROUP, repeats * min(rounds, 8))),
    )


def ratios_of(results: list[Result]) -> dict[str, float]:
    """By name, with the number of tokens."""
    ratios: dict[str, float] = {}
    for r in results:
        name, whole = f"{r.tokens}", r.cpu_us["whole"]
        ratios[f"delivery_whole_over_curve_{name}"] = whole / r.cpu_us["curve"]
        ratios[f"delivery_whole_over_ipc_{name}"] = whole / r.cpu_us["ipc"]
        ratios[f"delivery_whole_over_floor_{name}"] = whole / r.floor_us
        ratios[f"delivery_ranks_for_1000_gpus_{name}"] = r.ranks_needed
    return ratios


def tables(results: list[Result]) -> list[Table]:
    """The paths, the stages, and one rank."""
    paths = _table(
        "delivery: CPU µs per trajectory (wall µs)",
        (*PATHS, "floor", "whole / curve", "whole / ipc", "whole / floor"),
    )
    parts = _table(
        "stages without sockets: CPU µs per trajectory; in the floor: µs once",
        (*results[0].stage_us, *(f"floor: {name}" for name in results[0].floor_parts_us)),
    )
    rank = _table(
        f"one rank of the trainer; 1,000 GPUs finish {NEEDED_PER_S:,} samples/s",
        ("wall µs", "main µs", "I/O µs", "samples/s", "GB/s", "ranks for 1,000 GPUs"),
    )
    for r in results:
        head = (f"{r.tokens:,}", f"{r.size:,}")
        whole, one = r.cpu_us["whole"], r.rank
        paths.add_row(
            *head,
            *(f"{r.cpu_us[name]:.0f} ({r.wall_us[name]:.0f})" for name in PATHS),
            f"{r.floor_us:.0f}",
            f"{whole / r.cpu_us['curve']:.2f}",
            f"{whole / r.cpu_us['ipc']:.2f}",
            f"{whole / r.floor_us:.2f}",
        )
        stage_times = (*r.stage_us.values(), *r.floor_parts_us.values())
        parts.add_row(*head, *(f"{each:.1f}" for each in stage_times))
        rank.add_row(
            *head,
            *(f"{each:.0f}" for each in (one.wall_us, one.main_us, one.io_us, one.per_s)),
            f"{one.per_s * r.size / 1e9:.2f}",
            f"{r.ranks_needed:.1f}",
        )
    return [paths, parts, rank]


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for column in ("tokens", "bytes", *columns):
        table.add_column(column, justify="right")
    return table


WAYS = {
    "alone": Way(tcp=True),
    "groups": Way(tcp=True, together=GROUP),
    "groups, plain": Way(tcp=True, curve=False, together=GROUP),
}
"""Over TCP."""


def intake(effort: Effort) -> tuple[Table, list[dict[str, float | str]], dict[str, float]]:
    """What one intake takes in over loopback TCP: a table, the numbers, and ratios."""
    table = _table(
        "one intake over loopback TCP, with acknowledgement",
        ("sent", "wall µs", "main µs", "I/O µs", "MB/s measured", "MB/s with a core each"),
    )
    rows: list[dict[str, float | str]] = []
    ratios: dict[str, float] = {}
    for tokens in effort.lengths:
        for name, way in WAYS.items():
            size = 9 * tokens + 1000
            count = GROUP * max(8, min(500, int(effort.megabytes * effort.rounds * 1e6 / size / 8)))
            rank = take_in(tokens, count, way)
            rows.append({"tokens": tokens, "way": name, **asdict(rank)})
            shown = (rank.wall_us, rank.main_us, rank.io_us, rank.mb_per_s, rank.mb_per_s_of_cores)
            table.add_row(
                f"{tokens:,}", f"{rank.bytes_each:,}", name, *(f"{each:.0f}" for each in shown)
            )
            key = name.replace(", ", "_")
            ratios[f"intake_mb_per_s_{key}_{tokens}"] = rank.mb_per_s_of_cores
    return table, rows, ratios


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    parser.add_argument("--part", choices=("paths", "intake"), help="only this part")
    add_smoke(parser)
    args = parser.parse_args(arguments)
    effort = SMOKE if args.smoke else QUICK if args.quick else FULL
    if args.part == "intake":
        table, rows, found = intake(effort)
        Console(width=140).print(table)
        Console().print(found)
        if args.json:
            write_json(args.json, "delivery", {"intake": rows}, found, smoke=args.smoke)
        return
    results = [measure(tokens, effort) for tokens in effort.lengths]
    ratios = ratios_of(results)
    console = Console(width=160)
    for table in tables(results):
        console.print(table)
    raw: dict[str, Any] = {"lengths": [asdict(r) for r in results], "needed_per_s": NEEDED_PER_S}
    if args.part is None:
        table, raw["intake"], found = intake(effort)
        console.print(table)
        ratios |= found
    console.print(ratios)
    if args.json:
        write_json(args.json, "delivery", raw, ratios, smoke=args.smoke)
