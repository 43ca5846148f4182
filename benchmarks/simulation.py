"""Compare the simulator with real runs on this machine, and simulate a large cluster.

    python -m benchmarks.simulation [--quick] [--json FILE] [--runs DIR]

Makes real runs of examples/arithmetic.yaml, one after the other, that differ only in the settings
of the scheduler: synchronous, keep(1), verify. The costs are fitted to ONE of them, `verify`,
because in that run everything occurs: decoding, scoring, and training at the same time. All three
step times are predicted from that fit, so the machine's speed comes from one run, and the
differences between modes are predictions. The first three steps do not count. If other programs
load the machine while the runs follow each other, the ratios say little; the load is printed.

Then simulates every mode with 256 generators (H200, 7B), by both models of what verification
accepts, and with rejected answers that get another length. `--quick` makes runs of 20 steps and
simulates 32 generators.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrl.simulation.fit import Fit, fit_run
from asyncrl.simulation.study import MODES, Cluster, as_json, cluster, compare
from asyncrl.simulation.tables import mode_table
from benchmarks.harness import parser_of, run_command, write_json
from benchmarks.tiny_models import smoke_settings

EXAMPLE = "examples/arithmetic.yaml"
RUNS = {
    "sync": {"on_update": "keep", "max_off_policy_steps": 0, "max_runahead_groups": "null"},
    "keep(1)": {"on_update": "keep", "max_off_policy_steps": 1, "max_runahead_groups": "null"},
    "verify": {"on_update": "verify", "max_off_policy_steps": 0},
}
FITTED = "verify"
SEEDS = range(3)
SMOKE_STEPS = 16
SMOKE_RUNS = ("sync", FITTED)
SLOW = "rewards.functions=[{name: benchmarks/slow_reward.py:score}]"
"""Steps of a smoke last a third of a second at least, so that a few of them are looked at often
enough for a fit."""


def real_run(
    name: str, settings: dict[str, Any], steps: int, directory: Path, more: Sequence[str] = ()
) -> Path:
    """Run the example with these settings of the scheduler, and more; returns its directory."""
    overrides = {f"scheduler.{key}": value for key, value in settings.items()} | {
        "run.name": name,
        "run.directory": directory,
        "run.steps": steps,
        "evaluation.prompts": 8,
        "trainer.checkpoint_every": 10 * steps,
    }
    command = run_command(EXAMPLE, [*(f"{k}={v}" for k, v in overrides.items()), *more])
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return directory / name


def predicted(fit: Fit, like: Fit) -> float:
    """Predict the seconds of a step with the settings of `like` and the costs of `fit`."""
    outcomes = [cluster(like.config, fit, seed=seed).configured() for seed in SEEDS]
    return sum(outcome.step_seconds for outcome in outcomes) / len(outcomes)


def validate(fits: dict[str, Fit], console: Console) -> dict[str, Any]:
    """Print and return measured and simulated step times."""
    table = Table(title=f"seconds of a step, fitted to the run {FITTED!r}")
    for column in ("run", "measured s", "simulated s", "ratio", "fitted to itself"):
        table.add_column(column, justify="left" if column == "run" else "right")
    found: dict[str, Any] = {}
    for name, fit in fits.items():
        simulated, own = predicted(fits[FITTED], fit), predicted(fit, fit)
        found[name] = {
            "measured": fit.step_seconds,
            "simulated": simulated,
            "ratio": simulated / fit.step_seconds,
            "own_ratio": own / fit.step_seconds,
        }
        table.add_row(
            name, f"{fit.step_seconds:.3f}", f"{simulated:.3f}",
            f"{simulated / fit.step_seconds:.2f}", f"{own / fit.step_seconds:.2f}",
        )  # fmt: skip
    console.print(table)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "short runs, 32 generators")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the runs here")
    parser.add_argument("--no-runs", action="store_true", help="only the cluster, no real runs")
    args = parser.parse_args(arguments)
    console = Console(width=120)
    raw: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    if not args.no_runs:
        steps = SMOKE_STEPS if args.smoke else 20 if args.quick else 60
        chosen = SMOKE_RUNS if args.smoke else tuple(RUNS)
        load = os.getloadavg()[0]
        with TemporaryDirectory(prefix="asyncrl-simulation-") as temporary:
            directory = args.runs or Path(temporary)
            names = {name: f"simulation-{index}" for index, name in enumerate(RUNS)}
            small = [*smoke_settings(directory), SLOW] if args.smoke else ()
            paths = {n: real_run(names[n], RUNS[n], steps, directory, small) for n in chosen}
            fits = {name: fit_run(path) for name, path in paths.items()}
        raw["validation"] = validate(fits, console)
        raw["load_before"] = load
        console.print(f"load before: {load:.1f} of {os.cpu_count()} cores")
        ratios["simulated_over_measured_worst"] = max(
            (found["ratio"] for found in raw["validation"].values()), key=lambda r: abs(r - 1)
        )
    size = Cluster(generators=2 if args.smoke else 32 if args.quick else 256)
    for name, large in {
        "token": size,
        "block": replace(size, rule="block"),
        "block_new_length": replace(size, rule="block", new_length=1.0),
    }.items():
        outcomes = compare(large, MODES)
        console.print(mode_table(large, outcomes))
        raw[name] = as_json(outcomes)
        suffix = "" if name == "token" else f"_{name}"
        sync = outcomes["sync"].step_seconds
        ratios[f"sim256_sync_over_verify{suffix}"] = sync / outcomes["verify"].step_seconds
        ratios[f"sim256_sync_over_verify_3_ahead{suffix}"] = (
            sync / outcomes["verify, 3 ahead"].step_seconds
        )
        ratios[f"sim256_sync_over_verify_k1{suffix}"] = sync / outcomes["verify, k=1"].step_seconds
    console.print(ratios)
    if args.json:
        write_json(args.json, "simulation", raw, ratios, smoke=args.smoke)


if __name__ == "__main__":
    main()
