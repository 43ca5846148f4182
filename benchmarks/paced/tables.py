"""The tables that benchmarks.paced prints."""

from __future__ import annotations

from rich.table import Table

from asyncrl.simulation.outcome import Outcome
from benchmarks.paced.findings import FLOORS, TARGETS, Findings, label, reached
from benchmarks.paced.setting import KEEP_1, KEEP_4, SYNC, VERIFY, Machine, Paced
from benchmarks.targets import targets_table


def tables(findings: Findings) -> list[Table]:
    """A table for each setting, and the targets."""
    return [_modes(findings, setting) for setting in findings.settings()] + [_targets(findings)]


def _modes(findings: Findings, setting: Paced) -> Table:
    first, end = setting.window
    table = Table(
        title=f"{label(setting)}: {setting.machine.name}, training costs {setting.training:g} x "
        f"generation, steps {first} to {end - 1} of {setting.steps}, lengths / "
        f"{setting.scale.lengths:g}, dilated {setting.scale.dilation:g} x"
    )
    table.add_column("mode")
    for title in (
        *("s / step", "tokens", "gen. idle", "gen. device", "trainer dev.", "kept"),
        *("regen.", "max stale", "host", "overrun", "simulated", "dev."),
    ):
        table.add_column(title, justify="right")
    for mode, one in findings.of(setting).items():
        n = one.numbers
        table.add_row(
            mode,
            f"{n.step_seconds:.3f}",
            f"{n.tokens_per_step:.0f}",
            f"{n.generator_idle:.1%}",
            f"{n.generator_device_idle:.1%}",
            f"{n.trainer_device_idle:.1%}",
            "" if n.kept is None else f"{n.kept:.1%}",
            f"{n.regenerated:.1%}",
            f"{n.staleness_max:.0f}",
            f"{n.computed:.1%}",
            f"{n.overrun:.1%}",
            f"{one.simulated.step_seconds:.3f}",
            f"{one.deviation:+.1%}",
        )
    ratios = ", ".join(f"{name} {value:.3f}" for name, value in findings.compared(setting).items())
    table.caption = (
        f"{ratios}\ngen. device, trainer dev.: idle share of the modelled devices. host: real "
        "computation over the modelled time. overrun: share of the time by which steps were slower "
        "than modelled"
    )
    return table


def large_table(found: dict[int, dict[str, Outcome]], machine: Machine) -> Table:
    """The simulator's ratios by number of generators."""
    table = Table(title=f"simulated, whole answers: {machine.name}")
    table.add_column("generators", justify="right")
    for title in ("sync s / step", "sync/verify", "verify/keep1", "verify/keep4"):
        table.add_column(title, justify="right")
    for title in ("verify: gen. idle", "trainer idle", "regenerated"):
        table.add_column(title, justify="right")
    for generators, modes in found.items():
        verify, seconds = modes[VERIFY], modes[VERIFY].step_seconds
        table.add_row(
            str(generators),
            f"{modes[SYNC].step_seconds:.1f}",
            f"{modes[SYNC].step_seconds / seconds:.2f}",
            f"{seconds / modes[KEEP_1].step_seconds:.2f}",
            f"{seconds / modes[KEEP_4].step_seconds:.2f}",
            f"{verify.generator_idle:.1%}",
            f"{verify.trainer_idle:.1%}",
            f"{verify.regenerated:.1%}",
        )
    return table


def _targets(findings: Findings) -> Table:
    table = targets_table(findings.ratios(), TARGETS, FLOORS, reached)
    for run, reason in findings.failed.items():
        table.add_row(run, "", f"[bold red]{reason}[/]")
    return table
