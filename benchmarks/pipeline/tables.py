"""The tables that benchmarks.pipeline prints."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from rich.markup import escape
from rich.table import Table

from benchmarks.pipeline.findings import FLOORS, TARGETS, Findings, reached
from benchmarks.pipeline.modes import RUN_AHEAD, SYNC
from benchmarks.pipeline.run import GENERATOR, TRAINER, RunNumbers
from benchmarks.targets import targets_table


def tables(findings: Findings) -> list[Table]:
    """The tables, in the order in which they are printed."""
    ran = list(dict.fromkeys(run.mode for run in findings.runs))
    printed = [_costs(findings)]
    if ran:
        printed += [_modes(findings, ran), _time(findings, ran)]
    return [*printed, _targets(findings)]


def _costs(findings: Findings) -> Table:
    costs = findings.costs
    table = Table(title="model and costs", min_width=60)
    table.add_column("quantity")
    table.add_column("value", justify="right")
    median, p90, longest = costs.lengths
    values = {
        "parameters": f"{findings.parameters / 1e6:.1f} M",
        "response tokens: median, 90%, longest": f"{median:.0f}, {p90:.0f}, {longest:.0f}",
        f"decoded tokens/s, {costs.slots} rows, one core": f"{costs.decoded:.0f}",
        "the same, drafting from siblings": f"{costs.decoded_with_cache:.0f}",
        "scored (verified) tokens/s, one core": f"{costs.scored:.0f}",
        "cost of a decoded token in scored tokens": f"{costs.ratio:.1f}",
        "the same, drafting": f"{costs.ratio_with_cache:.1f}",
    }
    if findings.of(SYNC):
        for process, work in ((GENERATOR, "generation"), (TRAINER, "training")):
            seconds = statistics.fmean(run.busy_seconds(process) for run in findings.of(SYNC))
            values[f"{work}, busy seconds per step under sync"] = f"{seconds:.3f}"
    for name, value in values.items():
        table.add_row(name, value)
    return table


def _modes(findings: Findings, ran: list[str]) -> Table:
    first, end = findings.effort.window
    table = Table(
        title=f"steps {first} to {end - 1} of {findings.effort.steps}, "
        f"{len(findings.effort.seeds)} seed(s)"
    )
    table.add_column("mode")
    for title in (
        *("s / step", "tokens/s", "generator idle", "trainer idle", "staleness", "max"),
        *("regenerated", "kept", "accuracy"),
    ):
        table.add_column(title, justify="right")
    for mode in ran:
        runs = findings.of(mode)
        survivals = [run.survival for run in runs if run.survival is not None]
        accuracies = [run.accuracy for run in runs if run.accuracy is not None]
        table.add_row(
            mode,
            _spread([run.step_seconds for run in runs]),
            f"{_mean(runs, 'tokens_per_second'):.0f}",
            *(f"{findings.mean(mode, _idle(p)):.1%}" for p in (GENERATOR, TRAINER)),
            f"{_mean(runs, 'staleness_mean'):.2f}",
            f"{max(run.staleness_max for run in runs):.0f}",
            f"{_mean(runs, 'regenerated_share'):.1%}",
            f"{statistics.fmean(survivals):.1%}" if survivals else "",
            f"{statistics.fmean(accuracies):.3f}" if accuracies else "",
        )
    before = findings.accuracy_before
    missing = [(mode, escape(why)) for mode, why in findings.missing.items()]
    table.caption = (
        "regenerated: tokens rejected by verification / tokens trained on. kept: share of the "
        "verified tokens that were accepted"
        + (f". Accuracy before training: {before:.3f}" if before is not None else "")
        + "".join(f"\n[bold red]{mode} is MISSING:[/] {why}" for mode, why in missing)
    )
    return table


def _time(findings: Findings, ran: list[str]) -> Table:
    table = Table(title="time: work in seconds per step, idle shares by cause")
    for title in ("mode", "process", "work", "idle, waiting for"):
        table.add_column(title)
    for mode in ran:
        runs = findings.of(mode)
        for process in (GENERATOR, TRAINER):
            work = _means([run.busy[process] for run in runs])
            idle = _means([run.idle[process] for run in runs])
            table.add_row(
                mode if process == GENERATOR else "",
                process,
                ", ".join(f"{kind} {seconds:.3f}" for kind, seconds in work.items()),
                ", ".join(f"{cause} {share:.1%}" for cause, share in idle.items() if share > 5e-4),
            )
    return table


def _targets(findings: Findings) -> Table:
    ratios = findings.ratios()
    table = targets_table(ratios, TARGETS, FLOORS, reached)
    if "overlap_bound" in ratios:
        table.caption = (
            f"two busy processes slow each other down {ratios['overlap_slowdown']:.2f} times here: "
            f"sync_over_verify cannot be more than {ratios['overlap_bound']:.2f}"
        )
    difference = findings.accuracy_difference(RUN_AHEAD)
    if difference is None:
        table.add_row("accuracy_difference", "within noise", "[bold red]MISSING[/]")
    else:
        colour = "green" if difference.within_noise else "bold red"
        table.add_row(
            "accuracy_difference",
            "interval contains 0",
            f"[{colour}]{difference.mean:+.3f} ({difference.low:+.3f} to {difference.high:+.3f}, "
            f"{difference.of})[/]",
        )
    return table


def _idle(process: str) -> Callable[[RunNumbers], float]:
    return lambda run: run.idle_share(process)


def _mean(runs: list[RunNumbers], name: str) -> float:
    return statistics.fmean(float(getattr(run, name)) for run in runs)


def _means(maps: list[dict[str, float]]) -> dict[str, float]:
    """Mean by key, largest first. A missing key counts as 0."""
    keys = {key for values in maps for key in values}
    means = {key: statistics.fmean(values.get(key, 0.0) for values in maps) for key in keys}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _spread(values: list[float]) -> str:
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.3f}"
    return f"{mean:.3f} ({min(values):.3f}-{max(values):.3f})"
