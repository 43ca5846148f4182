"""The tables that benchmarks.peers prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from benchmarks.peers.findings import TARGETS, Findings, Run
from benchmarks.peers.workloads import Workload


def tables(findings: Findings) -> list[Table]:
    """One table per workload, then the targets."""
    return [*(_workload(findings, one) for one in findings.workloads), _targets(findings)]


def _workload(findings: Findings, workload: Workload) -> Table:
    table = Table(title=f"{workload.title}\nmedian (smallest to largest)")
    table.add_column("contestant")
    for title in (
        *("threads", "s / step", f"s to {workload.accuracy}", "steps to it", "s in all"),
        *("tokens/s", "accuracy at the end", "CPU s", "peak MB"),
    ):
        table.add_column(title, justify="right")
    names = dict.fromkeys(run.contestant for run in findings.runs)
    for name in names:
        runs = findings.of(workload, name)
        if not runs:
            continue
        reached = [run.seconds_to(workload) for run in runs]
        table.add_row(
            name + (" *" if any(run.usage.disturbed for run in runs) else ""),
            str(runs[0].threads),
            _spread([run.step_seconds for run in runs], 3),
            "not reached" if None in reached else _spread([s for s in reached if s is not None], 1),
            ", ".join(_steps(run, workload) for run in runs),
            _spread([run.seconds for run in runs], 1),
            _spread([run.tokens_per_second for run in runs], 0),
            _spread([run.reward(workload.window) for run in runs], 3),
            _spread([run.usage.cpu_seconds for run in runs], 0),
            _spread([run.usage.peak_bytes / 1e6 for run in runs], 0),
        )
    repeats = len(findings.of(workload, next(iter(names), "")))
    accuracy = f"mean reward of {workload.window} steps, sampled as in training"
    lines = [
        f"{repeats} repeat(s) of {workload.steps} steps; accuracy: {accuracy}",
        "* disturbed: other processes took more than 3% of the machine",
    ]
    for key, reason in findings.missing.items():
        if key.startswith(f"{workload.name}, "):
            name = key.split(", ", 1)[1]
            lines.append(f"[bold red]{name} is MISSING:[/] {escape(reason)}")
    table.caption = "\n".join(lines)
    return table


def _steps(run: Run, workload: Workload) -> str:
    seconds = run.seconds_to(workload)
    if seconds is None:
        return "-"
    return str(1 + next(i for i, step in enumerate(run.steps) if step.seconds == seconds))


def _targets(findings: Findings) -> Table:
    table = Table(title="TRL's seconds over those of asyncrl's verify", min_width=60)
    for title in ("ratio", "target", "to the accuracy", "for the same steps"):
        table.add_column(title, justify="left" if title == "ratio" else "right")
    ratios = findings.ratios()
    for name, target in TARGETS.items():
        found, steps = ratios.get(name), ratios.get(f"{name}_steps")
        colour = "green" if found is not None and found >= target else "bold red"
        table.add_row(
            name,
            f">= {target}",
            f"[{colour}]{'MISSING' if found is None else f'{found:.2f}'}[/]",
            "" if steps is None else f"{steps:.2f}",
        )
    return table


def _spread(values: Sequence[float], digits: int) -> str:
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"
