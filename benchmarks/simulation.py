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

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.table import Table

from asyncrl.simulation.fit import Fit, fit_run
from asyncrl.simulation.study import MODES, Cluster, cluster, compare
from asyncrl.simulation.tables import mode_table
from benchmarks.harness import output_of, parser_of, pick, report, run_command, table
from benchmarks.tiny_models import slow_settings

EXAMPLE = "examples/arithmetic.yaml"
RUNS = {
    "sync": {"on_update": "keep", "max_off_policy_steps": 0},
    "keep(1)": {"on_update": "keep", "max_off_policy_steps": 1},
    "verify": {"on_update": "verify", "max_off_policy_steps": 0, "max_runahead_groups": 32},
}
FITTED = "verify"
SEEDS = range(3)
SMOKE_STEPS = 16
SMOKE_RUNS = ("sync", FITTED)
SMOKE_CLUSTER = Cluster(generators=2, slots=8, steps=4, warm_up=1)


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
    output_of(command, name, 1800)
    return directory / name


def predicted(fit: Fit, like: Fit) -> float:
    """Predict the seconds of a step with the settings of `like` and the costs of `fit`."""
    outcomes = [cluster(like.config, fit, seed=seed).configured() for seed in SEEDS]
    return sum(outcome.step_seconds for outcome in outcomes) / len(outcomes)


def validate(fits: dict[str, Fit]) -> dict[str, Any]:
    """Measured and simulated step times."""
    found: dict[str, Any] = {}
    for name, fit in fits.items():
        simulated, own = predicted(fits[FITTED], fit), predicted(fit, fit)
        found[name] = {
            "measured": fit.step_seconds,
            "simulated": simulated,
            "ratio": simulated / fit.step_seconds,
            "own_ratio": own / fit.step_seconds,
        }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "short runs, 32 generators")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the runs here")
    parser.add_argument("--no-runs", action="store_true", help="only the cluster, no real runs")
    options = parser.parse_args(arguments)
    raw: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    shown: list[Table] = []
    if not options.no_runs:
        steps = pick(options, 60, 20, SMOKE_STEPS)
        chosen = SMOKE_RUNS if options.smoke else tuple(RUNS)
        with TemporaryDirectory(prefix="asyncrl-simulation-") as temporary:
            directory = options.runs or Path(temporary)
            names = {name: f"simulation-{index}" for index, name in enumerate(RUNS)}
            small = slow_settings(directory) if options.smoke else ()
            paths = {n: real_run(names[n], RUNS[n], steps, directory, small) for n in chosen}
            fits = {name: fit_run(path) for name, path in paths.items()}
        raw["validation"] = validate(fits)
        rows = ((name, *one.values()) for name, one in raw["validation"].items())
        columns = "run,measured s,simulated s,ratio,fitted to itself"
        shown.append(table(f"seconds of a step, fitted to the run {FITTED!r}", columns, rows))
        ratios["simulated_over_measured_worst"] = max(
            (found["ratio"] for found in raw["validation"].values()), key=lambda r: abs(r - 1)
        )
    size = pick(options, Cluster(generators=256), Cluster(generators=32), SMOKE_CLUSTER)
    block = replace(size, rule="block")
    for name, large in {
        "token": size,
        "block": block,
        "block_new_length": replace(block, new_length=1.0),
    }.items():
        outcomes = compare(large, MODES)
        shown.append(mode_table(large, outcomes))
        raw[name] = {mode: asdict(outcome) for mode, outcome in outcomes.items()}
        sync, suffix = outcomes["sync"].step_seconds, "" if name == "token" else f"_{name}"
        for mode, label in (
            ("verify", ""),
            ("verify, 3 ahead", "_3_ahead"),
            ("verify, k=1", "_k1"),
        ):
            ratios[f"sim256_sync_over_verify{label}{suffix}"] = sync / outcomes[mode].step_seconds
    report(options, "simulation", raw, ratios, *shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
