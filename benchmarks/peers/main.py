"""asyncrl next to what a user would pick instead, on the same training.

    python -m benchmarks.peers [--quick] [--json FILE] [--workloads A,B] [--contestants A,B]

    TRL                                     TRL 1.16, GRPOTrainer, generation with transformers
    sync, keep(1), verify, verify on vLLM   asyncrl's modes

Every contestant starts from the same weights and trains on the same prompts in the same order, with
the same rewards, batch, loss, optimizer, seeds and float32 (`benchmarks.peers.trl_train`), in
turns. TRL has two threads, asyncrl's generator and trainer one each. The clock starts when
everything is loaded. The statistic is the seconds to an accuracy (`benchmarks.peers.findings`). A
run during which other processes took more than 3% of the machine is marked. TRL runs in an
environment of its own, made on first use.

--quick: TRL, sync and verify, once, about 11 minutes on two quiet cores. In full: three seeds. The
first run also trains the models, which takes some minutes.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.harness import console, names_of, parser_of, report
from benchmarks.peers.contestants import (
    ESSENTIAL,
    SMOKE,
    SYNC,
    WORKLOADS,
    Contestant,
    TrlMissingError,
    Workload,
    contestants,
    make_model,
)
from benchmarks.peers.findings import Findings, Run, tables
from benchmarks.peers.measured_run import RunError, run_measured

SEEDS = (0, 1, 2)
"""In full; --quick uses the first."""
RUN_SECONDS = 1200.0
"""Longest time of one run."""


def measure(
    workloads: Sequence[Workload],
    chosen: Sequence[Contestant],
    seeds: Sequence[int],
    folder: Path,
    screen: Console,
) -> Findings:
    """All runs. What fails is recorded as missing, and the others continue."""
    findings = Findings(workloads)
    for workload in workloads:
        model = make_model(workload, folder)
        # Seed by seed, so that a machine that slows down over time affects all alike.
        for seed in seeds:
            for contestant in chosen:
                key = f"{workload.name}, {contestant.name}"
                if key in findings.missing:
                    continue
                place = folder / f"{workload.name}-{contestant.name.replace(' ', '-')}-{seed}"
                place.mkdir()
                try:
                    run = train(workload, contestant, model, seed, place)
                except (RunError, TrlMissingError) as error:
                    findings.missing[key] = str(error).splitlines()[-1]
                    screen.print(f"{key} failed: {error}", style="bold red", markup=False)
                    continue
                findings.runs.append(run)
                screen.print(
                    f"{key}, seed {seed}: {run.step_seconds:.3f} s / step, {run.seconds:.1f} s in "
                    f"all, mean reward {run.reward:.3f}, others {run.usage.others_share:.1%}, load "
                    f"{run.usage.load_before:.1f} before, {run.usage.load_after:.1f} after"
                    + (" DISTURBED" if run.usage.disturbed else ""),
                    highlight=False,
                    soft_wrap=True,
                )
    return findings


def train(workload: Workload, contestant: Contestant, model: Path, seed: int, folder: Path) -> Run:
    training = contestant.start(workload.config(model, seed), folder, contestant.threads)
    usage = run_measured(training.command, training.environment, RUN_SECONDS)
    steps = training.read()
    if len(steps) != workload.steps:
        raise RunError(f"it trained {len(steps)} steps instead of {workload.steps}")
    return Run(workload.name, contestant.name, seed, contestant.threads, steps, usage)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(options.keep or made)
        folder.mkdir(parents=True, exist_ok=True)
        findings = measure(options.workloads, options.contestants, options.seeds, folder, console())
    report(options, "peers", findings.raw(), findings.ratios(), *tables(findings))
    failed = {key.split(", ", 1)[1] for key in findings.missing}
    return 1 if failed & set(ESSENTIAL) else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, f"{', '.join(ESSENTIAL)}; one seed")
    known = {one.name: one for one in contestants()}
    names = [one.name for one in WORKLOADS]
    parser.add_argument("--keep", metavar="FOLDER", help="keep the runs in this new folder")
    parser.add_argument("--workloads", metavar="A,B", default=",".join(names))
    parser.add_argument("--contestants", metavar="A,B", help="only these; default: all")
    parser.add_argument("--repeats", type=int, help="seeds per contestant")
    parser.add_argument("--steps", type=int, help="optimizer steps of every run")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.contestants, options.repeats, options.workloads = SYNC, 1, SMOKE.name
        names = [SMOKE.name]
    asked = options.contestants or ",".join(ESSENTIAL if options.quick else known)
    options.contestants = [known[name] for name in names_of(parser, asked, known)]
    chosen = names_of(parser, options.workloads, names)
    options.workloads = [one for one in (*WORKLOADS, SMOKE) if one.name in chosen]
    if options.quick:
        options.workloads = [one.shortened() for one in options.workloads]
    if options.steps is not None:
        options.workloads = [replace(one, steps=options.steps) for one in options.workloads]
    options.seeds = range(options.repeats or (1 if options.quick else len(SEEDS)))
    return options
