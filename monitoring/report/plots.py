"""Plots as inline SVG, coloured by CSS classes (`c1`, `c2`, ...); `<title>` shows the numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from asyncrl.monitoring.report.markup import Child, Markup, element, join, legend
from asyncrl.monitoring.report.series import Values, thin, ticks

SLICES = 238
"""Number of slices of a timeline over its whole width."""
WIDTH = 520
HEIGHT = 236
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 38
MAX_POINTS = 260
"""Longer runs are drawn as means over neighbouring steps, at most this many."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a drawing, in pixels."""

    left: float
    top: float
    width: float
    height: float


def stacked_slices(
    slices: Sequence[Mapping[str, float]],
    styles: Mapping[str, str],
    box: Box,
    describe: Callable[[int], str],
) -> Markup:
    """One path per part, and over each slice an invisible band with the text `describe` gives.

    Each slice maps parts to shares of it, 0 to 1; an empty one is not drawn. `styles` are CSS
    classes by part, in the order from the bottom.
    """
    width = box.width / max(1, len(slices))
    paths: dict[str, list[str]] = {}
    bands = []
    for index, shares in enumerate(slices):
        if not shares:
            continue
        left, floor = box.left + index * width, box.top + box.height
        for part in styles:
            height = shares.get(part, 0.0) * box.height
            if height > 0:
                paths.setdefault(part, []).append(bar_path(left, floor, width, height))
                floor -= height
        band = element("rect", x=left, y=box.top, width=width, height=box.height)
        bands.append(element("g", element("title", describe(index)), band))
    marks = [element("path", d="".join(bars), class_=styles[part]) for part, bars in paths.items()]
    return element("g", marks, element("g", bands, class_="hover"))


def bar_path(left: float, floor: float, width: float, height: float) -> str:
    """Outline of an upright bar that stands on `floor`, as SVG path data."""
    return f"M{left:.2f} {floor:.2f}h{width:.2f}v{-height:.2f}h{-width:.2f}z"


def compact(value: float) -> str:
    """A number short enough for a tick: `0.25`, `1.5k`, `2M`, `3e-5`."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e3:
        return f"{value / 1e3:.3g}k"
    if size and size < 1e-3:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one layer of bars. `values[i]` belongs to the plot's `x[i]`; None is a gap."""

    name: str
    values: Values
    style: str = "c1"
    faint: bool = False
    """True to draw it thin and pale, as the raw numbers behind a smoothed line."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps numbers to pixels inside the plot's frame."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        """Pixels from the left edge."""
        share = (value - self.x_low) / (self.x_high - self.x_low or 1.0)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Pixels from the top edge."""
        share = (value - self.y_low) / (self.y_high - self.y_low or 1.0)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def figure(title: str, note: str, drawing: Child, series: Sequence[Series] = ()) -> Markup:
    """A drawing with its title, an explanation, and a legend if there are several series."""
    colours = [(line.name, line.style) for line in series if not line.faint]
    return element(
        "figure",
        element("figcaption", element("h3", title), element("p", note) if note else None),
        legend(colours) if len(colours) > 1 else None,
        drawing,
    )


def empty(title: str, reason: str) -> Markup:
    """A figure for a plot without data."""
    return figure(title, "", element("div", reason, class_="empty"))


def line_plot(
    title: str,
    x: Sequence[float],
    series: Sequence[Series],
    *,
    note: str = "",
    y_label: str = "",
    y_limits: tuple[float | None, float | None] = (None, None),
) -> Markup:
    """Lines over `x`. A limit of the y axis that is None follows the values."""
    x_thin, drawn = _thinned(x, series)
    known = [value for line in drawn for value in line.values if value is not None]
    if not known:
        return empty(title, "Nothing recorded.")
    low, high = _limits(min(known), max(known), y_limits)
    scale = Scale(x_thin[0], max(x_thin[-1], x_thin[0] + 1), low, high)
    marks = [_line(scale, x_thin, line) for line in drawn]
    hover = _hover(scale, x_thin, drawn, points=True)
    return figure(title, note, _svg(scale, title, y_label, [*marks, hover]), series)


def bar_plot(
    title: str, x: Sequence[float], layers: Sequence[Series], *, note: str = "", y_label: str = ""
) -> Markup:
    """Stacked layers, one bar per `x`. Gaps count as 0."""
    x_thin, drawn = _thinned(x, layers)
    totals = [sum(layer.values[i] or 0.0 for layer in drawn) for i in range(len(x_thin))]
    if not totals or max(totals) <= 0:
        return empty(title, "Nothing recorded.")
    spacing = (x_thin[-1] - x_thin[0]) / max(1, len(x_thin) - 1) or 1.0
    scale = Scale(x_thin[0] - spacing / 2, x_thin[-1] + spacing / 2, 0.0, max(totals) * 1.05)
    bases = [0.0] * len(x_thin)
    marks = []
    for layer in drawn:
        marks.append(_layer(scale, x_thin, layer, bases, spacing))
        bases = [base + (value or 0.0) for base, value in zip(bases, layer.values, strict=True)]
    hover = _hover(scale, x_thin, drawn, points=False)
    return figure(title, note, _svg(scale, title, y_label, [*marks, hover]), layers)


def _thinned(x: Sequence[float], series: Sequence[Series]) -> tuple[list[float], list[Series]]:
    x_thin = [value for value in thin(list(x), MAX_POINTS) if value is not None]
    drawn = [replace(line, values=thin(line.values, MAX_POINTS)) for line in series]
    return x_thin, drawn


def _limits(
    low: float, high: float, wanted: tuple[float | None, float | None]
) -> tuple[float, float]:
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    bottom = low - margin if wanted[0] is None else wanted[0]
    if wanted[0] is None and low >= 0.0:
        bottom = max(0.0, bottom)
    top = high + margin if wanted[1] is None else wanted[1]
    return bottom, max(top, bottom + 1e-12)


def _line(scale: Scale, x: Sequence[float], line: Series) -> Markup:
    pieces: list[str] = []
    dots: list[Markup] = []
    pen_down = False
    for index, (at, value) in enumerate(zip(x, line.values, strict=True)):
        if value is None:
            pen_down = False
            continue
        pieces.append(f"{'L' if pen_down else 'M'}{scale.x(at):.1f} {scale.y(value):.1f}")
        following = line.values[index + 1] if index + 1 < len(x) else None
        if not pen_down and following is None:
            dots.append(element("circle", cx=scale.x(at), cy=scale.y(value), r=2.5))
        pen_down = True
    style = f"line {line.style}" + (" faint" if line.faint else "")
    return element("g", element("path", d="".join(pieces)), dots, class_=style)


def _layer(
    scale: Scale, x: Sequence[float], layer: Series, bases: Sequence[float], spacing: float
) -> Markup:
    width = scale.x(spacing) - scale.x(0.0)
    gap = min(2.0, width * 0.18) if width >= 4.0 else 0.0
    floor = scale.y(0.0)
    pieces = []
    for at, value, base in zip(x, layer.values, bases, strict=True):
        if value is None or value <= 0:
            continue
        height = floor - scale.y(value)
        left = scale.x(at - spacing / 2) + gap / 2
        pieces.append(bar_path(left, scale.y(base), width - gap, height))
    return element("path", class_=f"area {layer.style}", d="".join(pieces))


def _hover(scale: Scale, x: Sequence[float], series: Sequence[Series], *, points: bool) -> Markup:
    """Invisible bands, one per x. Pointing at one shows a guide, the points and the numbers."""
    bands = []
    bottom = HEIGHT - BOTTOM
    for index, at in enumerate(x):
        left = scale.x((x[index - 1] + at) / 2) if index else LEFT
        right = scale.x((at + x[index + 1]) / 2) if index + 1 < len(x) else WIDTH - RIGHT
        known = [(line, line.values[index]) for line in series]
        text = f"step {at:.{int(abs(at - round(at)) >= 1e-6)}f}" + "".join(
            f"\n{line.name}: {compact(value)}" for line, value in known if value is not None
        )
        dots = [
            element("circle", cx=scale.x(at), cy=scale.y(value), r=3, class_=f"dot {line.style}")
            for line, value in known
            if points and value is not None
        ]
        width = max(0.5, right - left)
        band = element("rect", x=left, y=TOP, width=width, height=bottom - TOP)
        bands.append(element("g", element("title", text), band, dots))
    return element("g", bands, class_="hover")


def _svg(scale: Scale, title: str, y_label: str, marks: Sequence[Child]) -> Markup:
    parts = (_grid(scale), join(marks), _axis_labels(y_label))
    return element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)


def _grid(scale: Scale) -> Markup:
    bottom = HEIGHT - BOTTOM
    marks: list[Child] = []
    for value in ticks(scale.y_low, scale.y_high, 5):
        y = scale.y(value)
        marks.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        marks.append(element("text", compact(value), x=LEFT - 7, y=y + 3.5, class_="tick end"))
    for value in ticks(scale.x_low, scale.x_high, 8):
        if abs(value - round(value)) < 1e-9:
            x = scale.x(value)
            marks.append(element("text", f"{value:.0f}", x=x, y=bottom + 15, class_="tick mid"))
    marks.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_="axis"))
    return join(marks)


def _axis_labels(y_label: str) -> Markup:
    middle = (LEFT + WIDTH - RIGHT) / 2
    below = element("text", "optimizer step", x=middle, y=HEIGHT - 5, class_="label mid")
    if not y_label:
        return below
    y = (TOP + HEIGHT - BOTTOM) / 2
    turned = f"rotate(-90 11 {y:.1f})"
    left = element("text", y_label, x=11, y=y, class_="label mid", transform=turned)
    return join([below, left])
