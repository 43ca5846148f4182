"""What run-ahead brings when environments are slow: docs/modes.md. Simulated.

python -m benchmarks.slow_environments                       all of it (some minutes of CPU time)
python -m benchmarks.slow_environments --gpus 64 --latency 1   one place
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

from asyncrl.simulation.environments import Environments, GoBack
from asyncrl.simulation.network import Network
from asyncrl.simulation.study import Cluster
from benchmarks.harness import parser_of, report

GPUS = (8, 64, 256, 1024)
LATENCIES = (0.1, 1.0, 10.0)
MODES = ("sync", "keep(1)", "verify", "verify, k=1")
SLOTS = 16
"""Few, so that 1,024 GPUs can be simulated in minutes."""
TURNS = 4
STEPS = {8: (15, 4, 3), 64: (9, 3, 2), 256: (7, 2, 2), 1024: (5, 2, 1)}
"""By GPUs: steps, and how many at the beginning and at the end are left out."""


def cluster(gpus: int, latency: float, **changes: Any) -> Cluster:
    """A quarter of the GPUs train, as in `benchmarks.scaling`."""
    steps, warm_up, cool_down = STEPS.get(gpus, STEPS[64])
    given: dict[str, Any] = {
        "generators": gpus * 3 // 4,
        "slots": SLOTS,
        "trainer_devices": gpus / 4,
        "rule": "block",
        "steps": steps,
        "warm_up": warm_up,
        "cool_down": cool_down,
        "network": Network(100.0, 0.1),
        "environments": Environments(latency, turns=TURNS),
    }
    return Cluster(**given | changes)


def one(gpus: int, latency: float, mode: str, **changes: Any) -> dict[str, Any]:
    found = asdict(cluster(gpus, latency, **changes).simulate(mode))
    row = {"gpus": gpus, "latency": latency, "mode": mode, **found}
    print(
        f"| {gpus:,} | {latency:g} s | {mode} | {found['step_seconds']:.1f} | "
        f"{found['generator_idle']:.0%} ({found['environment_idle']:.0%}) | "
        f"{found['slots_used']:.0%} | {found['trainer_idle']:.0%} | {found['regenerated']:.0%} | "
        f"{found['turns_discarded']:.0%} |",
        flush=True,
    )
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "up to 64 GPUs")
    parser.add_argument("--gpus", type=int, action="append")
    parser.add_argument("--latency", type=float, action="append")
    parser.add_argument("--mode", action="append")
    parser.add_argument("--variants", action="store_true", help="one thing changed, on 64 GPUs")
    given = parser.parse_args(arguments)
    if given.quick:
        given.gpus = given.gpus or [8, 64]
    if given.smoke:
        given.gpus, given.latency, given.mode = [8], [1.0], ["sync", "verify"]
    rows = []
    print(
        "| GPUs | latency | mode | s/step | gen. idle (env.) | slots | train idle | regen. | lost |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for gpus in [] if given.variants else given.gpus or GPUS:
        for latency in given.latency or LATENCIES:
            rows += [one(gpus, latency, mode) for mode in given.mode or MODES]
    if given.variants:
        base = Environments(10.0, turns=TURNS)
        for name in get_args(GoBack):
            print(f"{name}:")
            changed = replace(base, go_back=name)
            rows += [one(64, 10.0, mode, environments=changed) for mode in MODES[2:]]
        print("at most as many samples as slots:")
        rows += [one(64, 10.0, mode, sessions=SLOTS) for mode in MODES]
        print("room for the KV of 16 thousand tokens:")
        rows.append(one(64, 10.0, "verify", kv_room=16_384.0))
    seconds = {
        f"step_seconds_{row['gpus']}_{row['latency']:g}_{row['mode']}": row["step_seconds"]
        for row in ([] if given.variants else rows)
    }
    report(given, "slow_environments", {"rows": rows}, seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
