"""Recomputes the steps of real runs from what their folders say, by other code.

    python -m benchmarks.step_audit --quick --json FILE

Each run is an ordinary `asyncrl run` with the built-in model, whose samples and checkpoints are
kept. From these alone, each step is computed again in float64 by formulas and loops that share
nothing with `trainer`: which policy drew each token with what probability, advantages, corrections,
loss, gradient, clipping, AdamW, and every metric. Printed is the largest relative difference of any
step, by run and quantity. The exit code is 1 if one is above its tolerance.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from rich.console import Console
from rich.table import Table

from asyncrl.tasks.config import ModelConfig
from asyncrl.tasks.model import resolve_model
from benchmarks.report import add_smoke, write_json
from benchmarks.run_command import run_command
from benchmarks.step_audit.cases import ALL, COMMON, QUICK, SMOKE, Case
from benchmarks.step_audit.compare import differences
from benchmarks.step_audit.folder import Folder
from benchmarks.step_audit.model import Model
from benchmarks.tiny_models import smoke_settings

TOLERANCE = 2e-3
"""Of what float32 computes: metrics, gradients in the first moment."""
_ROOT = Path(__file__).parents[2]
_SECONDS = 900.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_audit")
    parser.add_argument("--quick", action="store_true", help="what most people run, and no more")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--runs", nargs="*", choices=ALL, help="only these")
    parser.add_argument("--folder", type=Path, help="of runs; those there are not run again")
    add_smoke(parser)
    given = parser.parse_args(arguments)
    names = given.runs or list(SMOKE if given.smoke else QUICK if given.quick else ALL)
    found: dict[str, dict[str, float]] = {}
    console = Console()
    with TemporaryDirectory(prefix="step-audit-") as temporary:
        parent = given.folder or Path(temporary)
        small = smoke_settings(parent) if given.smoke else ()
        for name in names:
            found[name] = _audit(_run(parent, name, ALL[name], small))
            console.print(_table(name, found[name]))
    beyond = {
        f"{name} {quantity}": gap
        for name, of in found.items()
        for quantity, gap in of.items()
        if not gap <= TOLERANCE
    }
    for what, gap in beyond.items():
        console.print(f"[red]{what}: {gap:.2g} is above {TOLERANCE}")
    if given.json:
        write_json(
            given.json,
            "step_audit",
            {"differences": found},
            {"beyond": len(beyond)},
            smoke=given.smoke,
        )
    return 1 if beyond else 0


def _run(parent: Path, name: str, case: Case, more: Sequence[str] = ()) -> Path:
    """A finished run's folder; `more` are settings."""
    folder = parent / name
    if (folder / "result.json").exists():
        return folder
    example = _ROOT / "examples" / f"{case.example}.yaml"
    settings = [*COMMON, *case.settings, f"run.directory={parent}", f"run.name={name}", *more]
    for steps, how in ((case.resume_after, ()), (case.steps, ("--resume",))):
        if steps is not None:
            resumes = how if case.resume_after else ()
            command = run_command(example, [*settings, f"run.steps={steps}"], *resumes)
            subprocess.run(command, check=True, timeout=_SECONDS)
    return folder


def _audit(path: Path) -> dict[str, float]:
    source = yaml.safe_load((path / "config.yaml").read_text())["model"]["path"]
    folder = Folder(path, Path(resolve_model(ModelConfig(path=source), None)))
    worst: dict[str, float] = {}
    model = Model(folder.initial, folder.config["sampling"])
    for quantity, gap in differences(folder, model):
        worst[quantity] = max(worst.get(quantity, 0.0), gap)
    return worst


def _table(name: str, found: dict[str, float]) -> Table:
    table = Table("quantity", "largest relative difference", title=name)
    for quantity, gap in sorted(found.items(), key=lambda one: -one[1]):
        if gap:
            table.add_row(quantity, f"{gap:.1e}")
    exact = sum(not gap for gap in found.values())
    table.add_row(f"{exact} others", "0")
    return table


if __name__ == "__main__":
    sys.exit(main())
