"""Draw reward against wall time as SVG, one line per mode, without a plotting library."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.monitoring.report.markup import Markup, element
from asyncrl.monitoring.report.series import smooth, ticks
from benchmarks.pipeline.run import RunNumbers

WIDTH, HEIGHT = 860, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 44, 52
COLOURS = ("#6b7280", "#d9781b", "#c94384", "#8656cf", "#15957b", "#2f6bd8", "#a16207")
SPAN = 20.0
"""Steps over which the reward is smoothed."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """The curve of a mode: the mean over its seeds, and each seed."""

    name: str
    mean: list[Point]
    """(seconds, smoothed reward) after each step."""
    seeds: list[list[Point]]
    """The same for each seed; empty if there is only one."""


def curves(runs: Sequence[RunNumbers], span: float = SPAN) -> list[Curve]:
    """One curve per mode, in the order of the runs. Times and rewards are averaged per step."""
    found = []
    for mode in dict.fromkeys(run.mode for run in runs):
        seeds = [_smoothed(run.rewards, span) for run in runs if run.mode == mode]
        steps = min(len(points) for points in seeds)
        mean = [
            (
                statistics.fmean(points[step][0] for points in seeds),
                statistics.fmean(points[step][1] for points in seeds),
            )
            for step in range(steps)
        ]
        found.append(Curve(mode, mean, seeds if len(seeds) > 1 else []))
    return found


def _smoothed(rewards: Sequence[Point], span: float) -> list[Point]:
    values = smooth([reward for _, reward in rewards], span)
    return [
        (seconds, value)
        for (seconds, _), value in zip(rewards, values, strict=True)
        if value is not None
    ]


def draw(drawn: Sequence[Curve], title: str, note: str) -> Markup:
    """The plot. The first steps are left out: their smoothed reward is that of few samples."""
    kept = [(curve, curve.mean[_settled(curve.mean) :]) for curve in drawn]
    points = [point for _, line in kept for point in line]
    everything = [point for curve, line in kept for each in (line, *curve.seeds) for point in each]
    latest = max(seconds for seconds, _ in everything)
    rewards = [reward for _, reward in points]
    margin = 0.08 * (max(rewards) - min(rewards)) or 0.05
    low, high = min(rewards) - margin, max(rewards) + margin

    def x(seconds: float) -> float:
        return LEFT + seconds / latest * (WIDTH - LEFT - RIGHT)

    def y(reward: float) -> float:
        inside = min(high, max(low, reward))
        return HEIGHT - BOTTOM - (inside - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(line: Sequence[Point]) -> str:
        return "M" + "L".join(f"{x(seconds):.1f} {y(reward):.1f}" for seconds, reward in line)

    marks: list[Markup] = []
    for index, (curve, line) in enumerate(kept):
        colour = COLOURS[index % len(COLOURS)]
        style = {"fill": "none", "stroke": colour, "stroke_linejoin": "round"}
        marks += [
            element("path", d=path(s[_settled(s) :]), stroke_width=1, opacity=0.25, **style)
            for s in curve.seeds
        ]
        marks.append(element("path", d=path(line), stroke_width=2.4, **style))
        end, reward = line[-1]
        marks.append(element("circle", cx=x(end), cy=y(reward), r=3.5, fill=colour))
        marks += _legend(curve.name, end, colour, index)
    return element(
        "svg",
        element("title", title),
        element("rect", width=WIDTH, height=HEIGHT, fill="#ffffff", rx=10),
        _text(title, LEFT, 22, bold=True),
        _text(note, LEFT, 37, faint=True),
        _axes(x, y, latest, low, high),
        marks,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        font_family="system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif",
        font_size="12",
        role="img",
    )


def _legend(name: str, seconds: float, colour: str, index: int) -> list[Markup]:
    """A line of the legend: the mode, and the time that its steps took."""
    left, y = WIDTH - RIGHT + 18, TOP + 14 + 34 * index
    return [
        element("rect", x=left, y=y - 9, width=14, height=4, fill=colour),
        _text(name, left + 22, y - 3),
        _text(f"{seconds:,.0f} s", left + 22, y + 11, faint=True),
    ]


def _settled(line: Sequence[Point]) -> int:
    """Number of steps at the start that are left out."""
    return min(5, max(0, len(line) - 2))


def _axes(
    x: Callable[[float], float], y: Callable[[float], float], latest: float, low: float, high: float
) -> Markup:
    bottom = HEIGHT - BOTTOM
    marks = []
    for value in ticks(low, high, 6):
        line = {"x1": LEFT, "x2": WIDTH - RIGHT, "y1": y(value), "y2": y(value)}
        marks.append(element("line", stroke="#e4e7ec", **line))
        marks.append(_text(f"{value:.3g}", LEFT - 8, y(value) + 4, anchor="end", faint=True))
    marks += [
        _text(f"{value:g}", x(value), bottom + 18, anchor="middle", faint=True)
        for value in ticks(0.0, latest, 7)
    ]
    marks.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, stroke="#7f8999"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    marks.append(_text("seconds of training", middle, HEIGHT - 12, anchor="middle"))
    centre = (TOP + bottom) / 2
    turned = f"rotate(-90 16 {centre:.0f})"
    marks.append(_text("mean reward", 16, centre, anchor="middle", transform=turned))
    return element("g", marks)


def _text(
    content: str,
    x: float,
    y: float,
    *,
    anchor: str = "start",
    faint: bool = False,
    bold: bool = False,
    transform: str | None = None,
) -> Markup:
    return element(
        "text",
        content,
        x=round(x, 1),
        y=round(y, 1),
        text_anchor=anchor,
        fill="#7f8999" if faint else "#1b2230",
        font_weight="600" if bold else None,
        transform=transform,
    )


def write_plot(path: Path, runs: Sequence[RunNumbers]) -> None:
    """Write the plot to a file. The folder is created if necessary."""
    drawn = curves(runs)
    seeds = len({run.seed for run in runs})
    steps = min(len(run.rewards) for run in runs)
    note = f"{steps} optimizer steps in every mode, {seeds} seed(s), smoothed over {SPAN:.0f} steps"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(draw(drawn, "Reward against wall time", note)) + "\n", encoding="utf-8")
