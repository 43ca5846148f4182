"""Formats the simulator's results as tables."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from asyncrl.simulation.outcome import Outcome
from asyncrl.simulation.study import NEAR, Cluster, Place, right_choice


def mode_table(cluster: Cluster, outcomes: Mapping[str, Outcome]) -> Table:
    """Compare modes; speed is relative to the first one."""
    caption = "regen.: tokens rejected by verification over tokens trained on"
    columns = "mode,s/step,speed,tokens/s,gen. idle,train idle,staleness,regen."
    if cluster.environments is not None:
        columns += ",env. idle,slots,turns lost"
        caption += (
            "; env. idle: share of time in which samples only wait for environments; slots: share "
            "in use; turns lost: actions behind a rejection"
        )
    result = Table(title=cluster.title(), caption=caption)
    for column in columns.split(","):
        result.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    first = next(iter(outcomes.values())).step_seconds
    for mode, outcome in outcomes.items():
        shares = (outcome.environment_idle, outcome.slots_used, outcome.turns_discarded)
        result.add_row(
            mode,
            f"{outcome.step_seconds:.3g}",
            f"{first / outcome.step_seconds:.2f}x",
            f"{outcome.tokens_per_second:,.0f}",
            f"{outcome.generator_idle:.0%}",
            f"{outcome.trainer_idle:.0%}",
            f"{outcome.staleness_mean:.2f}, max {outcome.staleness_max}",
            f"{outcome.regenerated:.0%}",
            *([f"{share:.0%}" for share in shares] if cluster.environments is not None else ()),
        )
    return result


def regime_table(places: Sequence[Place]) -> Table:
    """Tabulate speed over `sync` and share of regenerated tokens, by mode and place."""
    result = Table(
        title="speed over sync / share regenerated, by median length and drift",
        caption=f"right: the strictest of k = 0, 1, 2 with {NEAR:.0%} of the speed of the fastest",
    )
    result.add_column("median", justify="right")
    result.add_column("TV", justify="right")
    modes = [mode for mode in places[0].outcomes if mode != "sync"]
    for mode in modes:
        result.add_column(mode, justify="right")
    result.add_column("right", justify="left")
    for place in places:
        sync, chosen = place.outcomes["sync"].step_seconds, [place.outcomes[mode] for mode in modes]
        cells = [f"{sync / one.step_seconds:.2f}x / {one.regenerated:.0%}" for one in chosen]
        result.add_row(f"{place.median:.0f}", f"{place.drift:g}", *cells, right_choice(place))
    return result
