"""A table of targets and of the ratios that were reached."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from rich.table import Table


def targets_table(
    ratios: Mapping[str, float],
    targets: Mapping[str, float],
    floors: Collection[str],
    reached: Callable[[str, float], bool],
) -> Table:
    """One line for each target: green if reached, red if not or if its ratio is missing."""
    table = Table(title="targets", min_width=60)
    table.add_column("ratio")
    for title in ("target", "reached"):
        table.add_column(title, justify="right")
    for name, target in targets.items():
        wanted = f"{'>=' if name in floors else '<='} {target:g}"
        if name not in ratios:
            table.add_row(name, wanted, "[bold red]MISSING[/]")
            continue
        colour = "green" if reached(name, ratios[name]) else "bold red"
        table.add_row(name, wanted, f"[{colour}]{ratios[name]:.3f}[/]")
    return table
