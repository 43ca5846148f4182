"""The tables that benchmarks.rollout prints."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.table import Table

from benchmarks.rollout.contestants import PLAIN
from benchmarks.rollout.findings import CEILINGS, LEFT_OUT, TARGETS, Findings, Kind, reached


def tables(findings: Findings) -> Iterator[Table]:
    """All measurements in detail, then every target with its result."""
    for kind, found in findings.measured.items():
        yield _rates(kind, found)
        if found.steps:
            yield _steps(kind, found)
    if findings.trees:
        yield _trees(findings)
    for steps, kept in findings.kept.items():
        yield _numbers(f"verification, version {steps}: tokens that each rule keeps", kept)
    if findings.machine:
        yield _numbers("this machine: least time of a step", findings.machine)
    yield _targets(findings)


def _columns(table: Table, titles: str) -> Table:
    for title in titles.split(","):
        table.add_column(title, justify="right")
    return table


def _rates(kind: str, found: Kind) -> Table:
    table = Table(
        title=f"{kind}: epoch 2 under the later version (waiting engines used at most "
        f"{found.max_waiting_cores():.2f} cores meanwhile)"
    )
    _columns(
        table,
        "rows,contestant,tokens/s,vs plain,range,acceptance,"
        "drafted/step,accepted/step,tokens/step,bound",
    )
    for rows, at in found.rows.items():
        for name in at.passes:
            drafting, versus = at.drafting(name), at.versus(name, PLAIN)
            bound = found.bound(rows)
            table.add_row(
                *(str(rows), name, f"{at.rate(name):,.0f}"),
                "" if versus is None else f"{versus.median:.2f}",
                "" if versus is None else f"{versus.lowest:.2f}-{versus.highest:.2f}",
                *("" if name == PLAIN else f"{drafting['acceptance']:.2f}",),
                *(f"{drafting[f'{what}_per_step']:.2f}" for what in ("drafted", "accepted")),
                f"{drafting['tokens_per_step']:.2f}",
                "" if bound is None or name == PLAIN else f"{bound:.2f}",
            )
    table.caption = (
        "vs plain: median and range over pairs of passes. Per step: per forward pass, all rows "
        "together. bound: speed-up if every draft were accepted, from the step times below."
    )
    return table


def _steps(kind: str, found: Kind) -> Table:
    table = Table(title=f"{kind}: time of a plain step of n tokens")
    _columns(table, "n," + ",".join(str(n) for n in found.steps))
    table.add_row("ms", *(f"{1e3 * seconds:.1f}" for seconds in found.steps.values()))
    table.add_row("tokens/s", *(f"{n / seconds:,.0f}" for n, seconds in found.steps.items()))
    if found.overhead:
        plain = statistics.median(p.seconds_per_step for p, _ in found.overhead)
        ours = statistics.median(o.seconds_per_step for _, o in found.overhead)
        drafted = sum(o.drafted for _, o in found.overhead)
        steps = sum(o.steps for _, o in found.overhead)
        spread = found.overheads()
        table.caption = (
            f"64 rows, alternating: plain {1e3 * plain:.2f} ms, drafting {1e3 * ours:.2f} ms per "
            f"step ({drafted / max(1, steps):.2f} tokens drafted per step); overhead "
            f"{statistics.median(spread):+.3f} ({min(spread):+.3f} to {max(spread):+.3f})"
        )
    return table


def _trees(findings: Findings) -> Table:
    table = Table(title="torch, 8 rows, equal node budgets: accepted drafts per forward pass")
    _columns(table, "nodes per row,chain,tree,tree / chain")
    for budget, (chain, tree) in findings.trees.items():
        table.add_row(
            str(budget), f"{chain:.2f}", f"{tree:.2f}", f"{tree / chain if chain else 0.0:.2f}"
        )
    return table


def _numbers(title: str, numbers: dict[str, float]) -> Table:
    table = Table(title=title)
    table.add_column("quantity")
    table.add_column("value", justify="right")
    for name, value in numbers.items():
        table.add_row(name.replace("_", " "), f"{value:,.3f}")
    return table


def _targets(findings: Findings) -> Table:
    table = Table(title="targets")
    table.add_column("ratio")
    _columns(table, "target,reached,range")
    ratios = findings.ratios()
    for name, target in TARGETS.items():
        sign = "<" if name in CEILINGS else ">="
        if name not in ratios:
            why = findings.missing.get(name.partition("_b")[0])
            shown = "left out" if why == LEFT_OUT else "[bold red]MISSING[/]"
            table.add_row(name, f"{sign} {target}", shown, "")
            continue
        colour = "green" if reached(name, ratios[name]) else "bold red"
        table.add_row(
            name, f"{sign} {target}", f"[{colour}]{ratios[name]:.3f}[/]", _range(name, findings)
        )
    return table


def _range(name: str, findings: Findings) -> str:
    kind, _, rest = name.partition("_b")
    rows, _, other = rest.partition("_vs_")
    if kind not in findings.measured or not rows.isdigit():
        return ""
    at = findings.measured[kind].rows.get(int(rows))
    versus = at and at.versus("ours", other)
    return f"{versus.lowest:.2f}-{versus.highest:.2f}" if versus else ""
