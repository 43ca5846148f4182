"""The tables that benchmarks.peers prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from benchmarks.peers.findings import TARGETS, Findings
from benchmarks.peers.workloads import Workload


def tables(findings: Findings) -> list[Table]:
    """One table per workload, then the targets."""
    return [*(_workload(findings, one) for one in findings.workloads), _targets(findings)]


def _workload(findings: Findings, workload: Workload) -> Table:
    table = Table(title=f"{workload.title}\nmedian (smallest to largest)")
    table.add_column("contestant")
    for title in (
        *("threads", "s / step", f"s to {workload.accuracy}", "steps to it", "s in all"),
        *("tokens/s", "mean reward", "CPU s", "peak MB"),
    ):
        table.add_column(title, justify="right")
    names = dict.fromkeys(run.contestant for run in findings.runs)
    for name in names:
        runs = findings.of(workload, name)
        if not runs:
            continue
        reached = findings.seconds_to_accuracy(workload, name)
        table.add_row(
            name + (" *" if any(run.usage.disturbed for run in runs) else ""),
            str(runs[0].threads),
            _spread([run.step_seconds for run in runs], 3),
            _spread(reached, 1) if reached else "not reached",
            _steps(findings, workload, name),
            _spread([run.seconds for run in runs], 1),
            _spread([run.tokens_per_second for run in runs], 0),
            _spread([run.reward for run in runs], 3),
            _spread([run.usage.cpu_seconds for run in runs], 0),
            _spread([run.usage.peak_bytes / 1e6 for run in runs], 0),
        )
    repeats = len(findings.of(workload, next(iter(names), "")))
    lines = [
        f"{repeats} repeat(s) of {workload.steps} steps; accuracy: reward, sampled as in training",
        "steps to it: of all on-policy runs together, keep(1)'s apart (each run alone)",
        "* disturbed: other processes took more than 3% of the machine",
    ]
    for key, reason in findings.missing.items():
        if key.startswith(f"{workload.name}, "):
            name = key.split(", ", 1)[1]
            lines.append(f"[bold red]{name} is MISSING:[/] {escape(reason)}")
    table.caption = "\n".join(lines)
    return table


def _steps(findings: Findings, workload: Workload, name: str) -> str:
    own = [run.own_step(workload.accuracy) for run in findings.of(workload, name)]
    together, *each = (
        "-" if at is None else str(at + 1)
        for at in (findings.step_of_accuracy(workload, name), *own)
    )
    return f"{together} ({', '.join(each)})"


def _targets(findings: Findings) -> Table:
    table = Table(title="TRL's seconds over those of asyncrl's fastest on-policy mode")
    for title in ("ratio", "target", "to the accuracy", "all steps", "median step", "mode"):
        table.add_column(title, justify="left" if title in ("ratio", "mode") else "right")
    ratios = findings.ratios()
    for workload in findings.workloads:
        name = f"peers_{workload.name}"
        found, target = ratios.get(name), TARGETS.get(name, 0.0)
        colour = "green" if found is not None and found >= target else "bold red"
        others = (ratios.get(f"{name}_steps"), ratios.get(f"{name}_median_step"))
        table.add_row(
            name,
            f">= {target}",
            f"[{colour}]{'MISSING' if found is None else f'{found:.2f}'}[/]",
            *("" if other is None else f"{other:.2f}" for other in others),
            findings.fastest(workload),
        )
    return table


def _spread(values: Sequence[float], digits: int) -> str:
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"
