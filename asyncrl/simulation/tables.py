"""What the simulator found, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from asyncrl.simulation.study import NEAR, Cluster, Place, right_choice
from asyncrl.simulation.world import Outcome


def table(cluster: Cluster, outcomes: Mapping[str, Outcome]) -> Table:
    """Modes side by side; speed is relative to the first."""
    out = Table(
        title=cluster.title(),
        caption="again: tokens that verification rejected, over tokens trained on",
    )
    columns = "mode,s/step,speed,tokens/s,gen. idle,train idle,staleness,again"
    for column in columns.split(","):
        out.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    first = next(iter(outcomes.values())).step_seconds
    for mode, outcome in outcomes.items():
        out.add_row(
            mode,
            f"{outcome.step_seconds:.3g}",
            f"{first / outcome.step_seconds:.2f}x",
            f"{outcome.tokens_per_second:,.0f}",
            f"{outcome.generator_idle:.0%}",
            f"{outcome.trainer_idle:.0%}",
            f"{outcome.staleness_mean:.2f}, max {outcome.staleness_max}",
            f"{outcome.regenerated:.0%}",
        )
    return out


def regime_table(places: Sequence[Place]) -> Table:
    """Speed over `sync`, and what is written again, for each mode."""
    out = Table(
        title="speed over sync / share written again, by median length and drift",
        caption=f"right: the strictest with {NEAR:.0%} of the speed of the fastest of k = 0, 1, 2",
    )
    out.add_column("median", justify="right")
    out.add_column("TV", justify="right")
    modes = [mode for mode in places[0].outcomes if mode != "sync"]
    for mode in modes:
        out.add_column(mode, justify="right")
    out.add_column("right", justify="left")
    for place in places:
        sync = place.outcomes["sync"].step_seconds
        cells = [
            f"{sync / place.outcomes[mode].step_seconds:.2f}x / "
            f"{place.outcomes[mode].regenerated:.0%}"
            for mode in modes
        ]
        out.add_row(f"{place.median:.0f}", f"{place.drift:g}", *cells, right_choice(place))
    return out
