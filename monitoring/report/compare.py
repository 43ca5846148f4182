"""`asyncrl compare`: runs side by side, as a table, as curves, and by their differences."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.monitoring.report.data import RunData
from asyncrl.monitoring.report.markup import Markup, element, page
from asyncrl.monitoring.report.plots import Series, line_plot
from asyncrl.monitoring.report.sections import section
from asyncrl.monitoring.report.series import Values, smooth
from asyncrl.monitoring.terminal.formatting import (
    ON_POLICY,
    UNKNOWN,
    count,
    duration,
    number,
    percent,
)
from asyncrl.wire.records.step import Measured, StepMetrics

_LAST = 10
"""Number of steps in the mean of "reward, last steps"."""
_PATHS = {"run.name", "run.directory", "run.changes"}
"""Settings that do not affect training, or are shown elsewhere."""


class Row(NamedTuple):
    """One line of the table."""

    name: str
    values: list[str]


class Curve(NamedTuple):
    """One number of each step."""

    title: str
    of: Callable[[StepMetrics], Measured]
    smoothed: bool = False


CURVES = (
    Curve("reward", lambda step: step.learning.reward_mean, smoothed=True),
    Curve("entropy", lambda step: step.learning.entropy),
    Curve("tokens per second", lambda step: step.tokens_per_second),
    Curve("seconds per step", lambda step: step.step_seconds),
    Curve("staleness", lambda step: step.staleness.mean),
    Curve("learning rate", lambda step: step.learning.learning_rate),
)


def table(runs: Sequence[RunData]) -> list[Row]:
    """Results of each run so far."""
    return [Row(name, [value(run) for run in runs]) for name, value in _ROWS.items()]


def differences(runs: Sequence[RunData]) -> list[Row]:
    """Settings that differ between runs; those that one of them lacks are left out."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = sorted(set.intersection(*[set(one) for one in flat]) - _PATHS)
    found = [Row(key, [_shown(one[key]) for one in flat]) for key in keys]
    changed = Row("orders", [_orders(run) for run in runs])
    return [row for row in [*found, changed] if len(set(row.values)) > 1]


def curve(run: RunData, one: Curve) -> Values:
    """A number of each step of a run, smoothed if single steps are noisy."""
    values = run.column(one.of)
    return smooth(values) if one.smoothed else values


def comparison_page(runs: Sequence[RunData]) -> str:
    """The whole comparison as HTML, without scripts or external resources."""
    names = " · ".join(run.name for run in runs)
    return page(
        f"{names} · asyncrl",
        [
            element("h1", names),
            section("Results", "So far, for runs that are active.", _html_table(runs, table(runs))),
            section(
                "Curves",
                "Each number by optimizer step; rewards are moving averages.",
                element("div", *[_plot(runs, one) for one in CURVES], class_="grid"),
            ),
            section(
                "What differs",
                "Settings that are not the same in all of these runs, and what users ordered.",
                _html_table(runs, differences(runs)),
            ),
        ],
    )


def _plot(runs: Sequence[RunData], one: Curve) -> Markup:
    last = max((int(run.steps[-1].step) for run in runs if run.steps), default=-1)
    series = []
    for index, run in enumerate(runs):
        by_step = dict(zip((step.step for step in run.steps), curve(run, one), strict=True))
        values = [by_step.get(step) for step in range(last + 1)]
        series.append(Series(run.name, values, f"c{1 + index % 6}"))
    return line_plot(one.title.capitalize(), [float(step) for step in range(last + 1)], series)


def _html_table(runs: Sequence[RunData], rows: Sequence[Row]) -> Markup:
    head = element("tr", element("th", ""), *[element("th", run.name) for run in runs])
    lines = [
        element("tr", element("th", row.name), *[element("td", value) for value in row.values])
        for row in rows
    ]
    return element("table", head, *lines)


def _flat(values: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and f"{outer}{key}" != "run.changes":
            yield from _flat(value, f"{outer}{key}.")
        else:
            yield f"{outer}{key}", value


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _orders(run: RunData) -> str:
    orders = [(one.arguments, one.step) for one in run.orders if one.order == "set"]
    given = [f"{what['key']}={what['value']} from step {step}" for what, step in orders]
    return ", ".join(given) or "none"


def _mean_of_last(run: RunData) -> str:
    known = [one.learning.reward_mean for one in run.steps[-_LAST:]]
    return number(sum(known) / len(known), 3) if known else UNKNOWN


def _on_policy(run: RunData) -> str:
    exactly = None if run.result is None else run.result.exactly_on_policy
    if run.result is None and run.steps:
        flags = [step.exactly_on_policy and not step.staleness.max for step in run.steps]
        exactly = None if None in flags else all(flags)
    return UNKNOWN if exactly is None else ON_POLICY[exactly]


def _seconds(run: RunData) -> float | None:
    return run.steps[-1].wall_seconds if run.steps else None


def _tokens_per_second(run: RunData) -> str:
    seconds = _seconds(run)
    return count(run.tokens().generated / seconds) if seconds else UNKNOWN


_ROWS: dict[str, Callable[[RunData], str]] = {
    "steps": lambda run: f"{len(run.steps)} of {run.setting('run.steps', UNKNOWN)}",
    f"reward, last {_LAST} steps": _mean_of_last,
    "held-out accuracy": RunData.course,
    "training time": lambda run: duration(_seconds(run)),
    "tokens": lambda run: count(run.tokens().generated),
    "tokens per second": _tokens_per_second,
    "drafted and accepted": lambda run: percent(
        run.tokens().accepted / run.tokens().generated if run.tokens().generated else None
    ),
    "staleness at most": lambda run: str(max((one.staleness.max for one in run.steps), default=0)),
    "on-policy": _on_policy,
}
