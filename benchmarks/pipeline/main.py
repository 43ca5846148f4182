"""The price of exactly on-policy data: real runs in every mode, one after the other.

    python -m benchmarks.pipeline [--quick] [--json FILE]

Each run is `asyncrl run benchmarks/pipeline/pipeline.yaml`; model, prompts, seeds and number of
optimizer steps are the same, only the scheduler's settings differ. Generator and trainer have one
core each. The model's answers have uneven lengths (`benchmarks.pipeline.model`), and it is widened,
so that decoding few rows costs several times as much as scoring, as on a GPU. The statistic is the
mean step time of the timed steps: the first and last ones are left out, since the pipeline fills
and nothing is left to run ahead for. --quick: one seed, 50 steps. In full: three seeds, 160 steps.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.wire.records.evaluations import accuracy_of
from benchmarks.harness import console, names_of, parser_of, pick, report
from benchmarks.pipeline.costs import measure_costs
from benchmarks.pipeline.findings import Findings, tables
from benchmarks.pipeline.model import SMOKE_MODEL, ModelRecipe, ensure_model
from benchmarks.pipeline.overlap import measure_slowdown
from benchmarks.pipeline.run import (
    CONFIG,
    FULL,
    QUICK,
    SMOKE,
    VERIFY,
    Effort,
    Mode,
    RunError,
    RunNumbers,
    carry_out,
    modes,
    read_run,
)
from benchmarks.tiny_models import widen


def measure(
    effort: Effort, chosen: Sequence[Mode], folder: Path, screen: Console, model: Path
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
                screen.print(f"[bold red]{mode.name} is MISSING:[/] {reason}")
                continue
            try:
                run = run_and_evaluate(mode, seed, wide, effort, folder)
            except RunError as error:
                findings.failed = True
                findings.missing[mode.name] = f"failed: {str(error).splitlines()[0]}"
                screen.print(str(error), style="bold red", markup=False, highlight=False)
                continue
            findings.runs.append(run)
            screen.print(
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
    screen, effort = console(), pick(options, FULL, QUICK, SMOKE)
    if options.steps:
        effort = replace(effort, steps=options.steps)
    with tempfile.TemporaryDirectory() as made:
        recipe, cache = (SMOKE_MODEL, Path(made)) if options.smoke else (ModelRecipe(), None)
        model = ensure_model(recipe, cache)
        folder = Path(options.keep or made)
        folder.mkdir(parents=True, exist_ok=True)
        findings = measure(effort, options.modes, folder, screen, model)
    report(options, "pipeline", findings.raw(), findings.ratios(), *tables(findings))
    return 1 if findings.failed else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, "one seed, fewer steps")
    known = {mode.name: mode for mode in modes()}
    parser.add_argument("--keep", metavar="FOLDER", help="keep the runs in this folder")
    parser.add_argument("--steps", type=int, help="optimizer steps per run")
    parser.add_argument("--modes", metavar="A,B", default=",".join(known), help="only these modes")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.modes = VERIFY
    options.modes = [known[name] for name in names_of(parser, options.modes, known)]
    minimum = QUICK.left_out_first + QUICK.left_out_last + 1
    if options.steps is not None and options.steps < minimum:
        parser.error(f"--steps must be at least {minimum}: the first and last ones are not timed")
    return options
