"""Whether real runs train on draws of the policies that they say.

    python -m benchmarks.live_audit [--quick] [--runs "arithmetic;guessing"] [--engine torch]
                                    [--steps N] [--seed S] [--set KEY=VALUE] [--json FILE]
    python -m benchmarks.live_audit --mutants [NAMES] [--json FILE]
    python -m benchmarks.live_audit --run runs/NAME

Each run is `asyncrl run` in processes of its own: run-ahead, drafts from the cache, verification,
partial rollouts, environments, evaluations, and what is killed. Then the distribution of every
trained token is computed again from the checkpoint of its version with plain transformers, and
everything that must have mean 0 is summed (`statements`), samples are tested for independence
(`independence`) and groups are compared with plain sampling (`reference`).

Exits with status 1 if a right run fails a statement at `FALSE_ALARM` for the whole run, if
something is missing or recorded wrongly, or if a mutant is not detected.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

QUICK = ("arithmetic", "fixed", "guessing", "killed", "resumed")
SMOKE = ("evaluation.prompts=4", "evaluation.every=null")
MUTATED = {
    "accept-too-often": "arithmetic",
    "accept-all": "arithmetic",
    "drafts-too-often": "arithmetic",
    "shared-seeds": "arithmetic",
    "unlikely-ones-again": "fixed",
}
"""Wrong runs: the mutant, and the scenario that it spoils."""
RECORDS = "records"
"""In their place: a right run, whose records are spoiled in several ways (`spoils`)."""


def main(arguments: Sequence[str] | None = None) -> int:
    import torch
    from transformers.utils import logging

    from benchmarks.chaos.live_run import ChaosError
    from benchmarks.live_audit.audit import NotAuditableError
    from benchmarks.live_audit.runs import SCENARIOS
    from benchmarks.report import add_smoke, write_json
    from benchmarks.tiny_models import smoke_settings

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"the runs {', '.join(QUICK)}")
    parser.add_argument("--runs", help=f"some of: {'; '.join(SCENARIOS)} (separated by ;)")
    parser.add_argument("--engine", default="torch", choices=("torch", "vllm", "sglang"))
    parser.add_argument(
        "--mutants", nargs="?", const=";".join((*MUTATED, RECORDS)), metavar="NAMES",
        help=f"wrong runs, which must be found: {'; '.join((*MUTATED, RECORDS))}",
    )  # fmt: skip
    parser.add_argument("--run", type=Path, help="audit a finished run that logged its tokens")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs there")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here")
    add_smoke(parser)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.runs = options.runs or QUICK[0]
        options.steps = options.steps or 3
    names = options.runs.split(";") if options.runs else list(QUICK if options.quick else SCENARIOS)
    if unknown := [name for name in names if name not in SCENARIOS]:
        parser.error(f"no run {unknown[0]!r}; the runs are {'; '.join(SCENARIOS)}")
    wrong = options.mutants.split(";") if options.mutants else []
    if unknown := [name for name in wrong if name not in (*MUTATED, RECORDS)]:
        parser.error(f"no mutant {unknown[0]!r}; there are {'; '.join((*MUTATED, RECORDS))}")
    folder = options.keep or Path(mkdtemp(prefix="asyncrl-live-audit-"))
    folder.mkdir(parents=True, exist_ok=True)
    if options.smoke:
        options.settings = [*smoke_settings(folder), *SMOKE, *options.settings]
    try:
        if options.run:
            raw = {options.run.name: _audited(options.run)}
        elif options.mutants:
            raw = _mutants(folder, options)
        else:
            raw = {name: _carried_out(name, folder, options) for name in names}
    except (NotAuditableError, ChaosError) as error:
        parser.error(str(error))
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        least = {name: found["p_value"] for name, found in raw.items()}
        write_json(options.json, "live_audit", raw, least, smoke=options.smoke)
    return 0 if all(found["as it should be"] for found in raw.values()) else 1


def _carried_out(
    name: str, folder: Path, options: Any, mutant: str | None = None
) -> dict[str, Any]:
    from benchmarks.live_audit.audit import forget_versions
    from benchmarks.live_audit.runs import carry_out

    began = time.perf_counter()
    run = carry_out(
        name, folder, engine=options.engine, steps=options.steps, seed=options.seed,
        settings=tuple(options.settings), mutant=mutant,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    found = _audited(run, is_right=mutant is None)
    forget_versions(run)
    return found | {"run_seconds": seconds}


def _audited(run: Path, *, is_right: bool = True) -> dict[str, Any]:
    from benchmarks.live_audit.audit import audit

    began = time.perf_counter()
    report = audit(run)
    _print(report, is_right=is_right)
    seconds = time.perf_counter() - began
    fine = report.is_fine == is_right
    return report.as_dict() | {"as it should be": fine, "audit_seconds": seconds}


def _mutants(folder: Path, options: Any) -> dict[str, Any]:
    """Wrong runs, and a right run whose records are spoiled."""
    found: dict[str, Any] = {}
    for mutant in options.mutants.split(";"):
        if mutant == RECORDS:
            found |= _spoils(folder, options)
        else:
            found[mutant] = _carried_out(MUTATED[mutant], folder, options, mutant)
    return found


def _spoils(folder: Path, options: Any) -> dict[str, Any]:
    from tempfile import TemporaryDirectory

    from benchmarks.live_audit.audit import judge, read
    from benchmarks.live_audit.runs import carry_out
    from benchmarks.live_audit.spoils import SPOILS, spoiled

    run = carry_out("fixed", folder, steps=options.steps, seed=options.seed)
    found = {}
    with TemporaryDirectory(prefix="asyncrl-audit-") as scratch:
        material = read(run, Path(scratch))
        for name in SPOILS:
            report = judge(spoiled(material, name, options.seed))
            _print(report, is_right=False, about=name)
            # What is missing is found without any chance; `p_value` says what the sums see of it.
            found[name] = report.as_dict() | {"as it should be": not report.is_fine}
    return found


def _print(report: Any, *, is_right: bool, about: str = "") -> None:
    from rich.console import Console
    from rich.table import Table

    counts = ", ".join(f"{count:,} {name}" for name, count in report.counts.items())
    title = (
        f"{about or report.run}: {report.samples:,} samples, {report.tokens:,} tokens ({counts}); "
        f"log-probabilities within {report.worst_logprob:.1e}; "
        f"{len(report.statements)} statements, p = {report.p_value:.2g} for all together"
    )
    table = Table(title=title, title_justify="left")
    for column in ("statement", "n", "z", "effect", "p-value", ""):
        table.add_column(column, justify="left" if column == "statement" else "right")
    for one in sorted(report.statements, key=lambda one: one.p_value)[:6]:
        wrong = "WRONG" if one.p_value < report.limit else "ok"
        table.add_row(
            one.name, f"{one.n:,}", f"{one.z:.2f}", f"{one.effect:.4f}", f"{one.p_value:.2g}", wrong
        )
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for fault in report.faults:
        console.print(f"WRONG: {fault}")
    verdict = "nothing is wrong" if report.is_fine else f"{len(report.failed)} statements fail"
    console.print(verdict + ("" if is_right else " (this run is wrong on purpose)"))
