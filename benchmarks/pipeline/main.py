"""The price of exactly on-policy data: real runs in every mode, one after the other.

    python -m benchmarks.pipeline [--quick] [--json FILE] [--plot FILE.svg]

Each run is `asyncrl run benchmarks/pipeline/pipeline.yaml --set ...` in its own processes. Model,
prompts, seeds and number of optimizer steps are the same; only the mode's settings differ (they are
printed with its result). Generator and trainer have one core each (`launcher.pin_cores`);
controller and reward workers share the trainer's core if there is no third. The model is the
built-in one. It is taught to muse before it answers, so that lengths are uneven
(`benchmarks.pipeline.model`), and widened, so that decoding a few rows costs several times as much
as scoring, as on a GPU. The costs of decoding and scoring are measured first and printed, as are
those of generation and training.

The first and last steps are not timed (the table names the timed ones): the pipeline has to fill,
and near the end there is nothing left to run ahead for. Idle shares come from the processes' time
lines (`monitoring.records.spans`). Accuracy is that of the last checkpoint on held-out problems,
sampled as in training, with the same random numbers for all modes.

--quick: one seed, 50 steps, about 9 minutes on two quiet cores; the interval of its
accuracy_difference covers the noise of the evaluation only. In full: three seeds, 160 steps, about
an hour. The first run on a machine also trains the model, which takes some minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.wire.records.evaluations import accuracy_of
from benchmarks.pipeline.costs import measure_costs
from benchmarks.pipeline.findings import Findings
from benchmarks.pipeline.model import SMOKE_MODEL, ModelRecipe, ensure_model
from benchmarks.pipeline.modes import CONFIG, FULL, QUICK, SMOKE, VERIFY, Effort, Mode, modes
from benchmarks.pipeline.overlap import measure_slowdown
from benchmarks.pipeline.plot import write_plot
from benchmarks.pipeline.run import RunError, RunNumbers, carry_out, read_run
from benchmarks.pipeline.tables import tables
from benchmarks.report import add_smoke, write_json
from benchmarks.widen import widen

PRINTED_WIDTH = 132
"""Characters per line if the output goes to a file."""


def measure(
    effort: Effort, chosen: Sequence[Mode], folder: Path, console: Console, model: Path
) -> Findings:
    """All runs. A mode that fails or is not supported is recorded, and the others continue."""
    wide = folder / "model"
    parameters = widen(str(model), wide, effort.intermediate_size)
    findings = Findings(effort, measure_costs(wide, effort.prompts, effort.more), parameters)
    findings.slowdown = measure_slowdown(effort.turn_seconds)
    findings.accuracy_before = held_out_accuracy(wide, effort)
    # Seed by seed, so that a machine that slows down over time affects all modes alike.
    for seed in effort.seeds:
        for mode in chosen:
            if mode.name in findings.missing:
                continue
            reason = mode.missing()
            if reason is not None:
                findings.missing[mode.name] = reason
                console.print(f"[bold red]{mode.name} is MISSING:[/] {reason}")
                continue
            try:
                run = run_and_evaluate(mode, seed, wide, effort, folder)
            except RunError as error:
                findings.failed = True
                findings.missing[mode.name] = f"failed: {str(error).splitlines()[0]}"
                console.print(str(error), style="bold red", markup=False, highlight=False)
                continue
            findings.runs.append(run)
            console.print(
                f"{mode.name}, seed {seed}: {run.step_seconds:.3f} s / step, "
                f"accuracy {run.accuracy:.3f}   ({' '.join(mode.settings)})",
                highlight=False,
                soft_wrap=True,
            )
    return findings


def run_and_evaluate(
    mode: Mode, seed: int, model: Path, effort: Effort, folder: Path
) -> RunNumbers:
    """One run of a mode, with the held-out accuracy of its last checkpoint."""
    run = carry_out(mode, seed, model=model, effort=effort, folder=folder)
    numbers = read_run(run, mode.name, seed, effort.window)
    from asyncrl.tasks.exported_model import model_of  # late: torch

    model = model_of(path_of(run / "checkpoints", effort.steps), print)
    return replace(numbers, accuracy=held_out_accuracy(model, effort))


def held_out_accuracy(model: Path, effort: Effort) -> float:
    """Held-out accuracy as `asyncrl eval` measures it: many rows, all cores, a fixed seed."""
    from asyncrl.config.run_config import load_config
    from asyncrl.evaluation.command import evaluate_model

    cores = len(os.sched_getaffinity(0))
    config = load_config(
        CONFIG,
        (
            *("engine.slots=64", f"engine.threads={cores}", "run.seed=0", "cache.enabled=false"),
            f"evaluation.prompts={effort.evaluated}",
            f"task.evaluation_size={effort.evaluated}",
            *effort.more,
        ),
    )
    accuracy = accuracy_of(evaluate_model(config, str(model), Console(quiet=True)))
    if accuracy is None:
        raise RunError(f"the evaluation of {model} is incomplete: too many samples are unscored")
    return accuracy


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    console = Console(width=None if sys.stdout.isatty() else PRINTED_WIDTH)
    effort = SMOKE if options.smoke else QUICK if options.quick else FULL
    if options.steps:
        effort = replace(effort, steps=options.steps)
    load = os.getloadavg()[0]
    if load > 0.5:
        console.print(f"[yellow]the machine is busy (load {load:.1f}): timings are unreliable[/]")
    with tempfile.TemporaryDirectory() as made:
        recipe, cache = (SMOKE_MODEL, Path(made)) if options.smoke else (ModelRecipe(), None)
        model = ensure_model(recipe, cache)
        folder = Path(options.keep or made)
        folder.mkdir(parents=True, exist_ok=True)
        findings = measure(effort, options.modes, folder, console, model)
    for table in tables(findings):
        console.print(table)
    if options.plot and findings.runs:
        write_plot(Path(options.plot), findings.runs)
    if options.json:
        raw = {"load_before": load, "load_after": os.getloadavg()[0], **findings.raw()}
        write_json(options.json, "pipeline", raw, findings.ratios(), smoke=options.smoke)
    return 1 if findings.failed else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    known = {mode.name: mode for mode in modes()}
    parser.add_argument("--quick", action="store_true", help="one seed, fewer steps")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    parser.add_argument("--plot", metavar="FILE", help="draw reward against wall time as SVG")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the runs in this folder")
    parser.add_argument("--steps", type=int, help="optimizer steps per run")
    parser.add_argument(
        "--modes",
        metavar="A,B",
        default=",".join(known),
        help="only these modes",
    )
    add_smoke(parser)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.modes = VERIFY
    names = [name.strip() for name in options.modes.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no mode {unknown[0]!r}; the modes are {', '.join(known)}")
    options.modes = [known[name] for name in names]
    minimum = QUICK.left_out_first + QUICK.left_out_last + 1
    if options.steps is not None and options.steps < minimum:
        parser.error(f"--steps must be at least {minimum}: the first and last ones are not timed")
    return options
