"""What run-ahead brings when environments are slow: docs/modes.md. Simulated.

python -m benchmarks.slow_environments                       all of it (some minutes of CPU time)
python -m benchmarks.slow_environments --gpus 64 --latency 1   one place
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

from asyncrl.simulation.environments import Environments, GoBack
from asyncrl.simulation.network import Network
from asyncrl.simulation.study import Cluster
from benchmarks.harness import parser_of, pick, report, table

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


def one(gpus: int, latency: float, mode: str, note: str = "", **changes: Any) -> dict[str, Any]:
    found = asdict(cluster(gpus, latency, **changes).simulate(mode))
    return {"gpus": gpus, "latency": latency, "mode": mode, "note": note, **found}


def variants() -> Iterator[dict[str, Any]]:
    """One thing changed, on 64 GPUs."""
    base = Environments(10.0, turns=TURNS)
    for name in get_args(GoBack):
        changed = replace(base, go_back=name)
        yield from (one(64, 10.0, mode, name, environments=changed) for mode in MODES[2:])
    few = "as many samples as slots"
    yield from (one(64, 10.0, mode, few, sessions=SLOTS) for mode in MODES)
    yield one(64, 10.0, "verify", "room for the KV of 16 thousand tokens", kv_room=16_384.0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "up to 64 GPUs")
    parser.add_argument("--gpus", type=int, action="append")
    parser.add_argument("--latency", type=float, action="append")
    parser.add_argument("--mode", action="append")
    parser.add_argument("--variants", action="store_true", help="one thing changed, on 64 GPUs")
    given = parser.parse_args(arguments)
    if given.smoke:
        given.gpus, given.latency, given.mode = [8], [1.0], ["sync", "verify"]
    if given.variants:
        rows = list(variants())
    else:
        every = given.gpus or pick(given, GPUS, GPUS[:2], GPUS[:1])
        places = itertools.product(every, given.latency or LATENCIES, given.mode or MODES)
        rows = [one(*place) for place in places]
    numbers = (
        "step_seconds,generator_idle,environment_idle,slots_used,trainer_idle,regenerated,"
        "turns_discarded"
    )
    columns = ("gpus", "latency", "mode", "note", *numbers.split(","))
    shown = table("simulated", columns, ([row[name] for name in columns] for row in rows))
    seconds = {
        f"step_seconds_{row['gpus']}_{row['latency']:g}_{row['mode']}": row["step_seconds"]
        for row in ([] if given.variants else rows)
    }
    report(given, "slow_environments", {"rows": rows}, seconds, shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
