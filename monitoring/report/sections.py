"""The report's sections, each a function of the run's data."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from monitoring.report.data import RunData
from monitoring.report.markup import Child, Markup, element
from monitoring.report.plots import Series, bar_plot, empty, figure, line_plot
from monitoring.report.samples import sample_card, samples_legend
from monitoring.report.series import growth, smooth, ticks, wilson
from monitoring.samples import choose_samples
from monitoring.wording import percent
from wire.records import Measured, StepMetrics

OPEN_SAMPLES = 4
"""This many sample trajectories are shown at once; the others unfold."""


def section(title: str, about: str, *content: Child) -> Markup:
    """A heading, what there is to see, and it."""
    return element("section", element("h2", title), element("p", about, class_="about"), *content)


def learning(data: RunData) -> Markup:
    """Reward and evaluation."""
    rewards = data.column(lambda step: step.learning.reward_mean)
    return section(
        "Learning",
        "Rewards are those of the samples that each step trained on. Accuracy is measured on "
        "questions that are never trained on, sampled as in training.",
        element(
            "div",
            line_plot(
                "Reward",
                data.step_numbers(),
                [
                    Series("smoothed", smooth(rewards), "c1"),
                    Series("mean of the step", rewards, "c1", faint=True),
                ],
                note="Mean over each step's samples (thin) and its moving average (bold).",
                y_label="reward",
            )
            if data.steps
            else empty("Reward", "No step is finished yet."),
            _evaluation(data),
            class_="grid",
        ),
    )


def _evaluation(data: RunData) -> Markup:
    trials = data.evaluation_samples()
    points = []
    for name, style in (("before", "c6"), ("after", "c3")):
        value = data.outcome(f"accuracy_{name}")
        if value is not None and 0 <= value <= 1:
            points.append((name, style, value, wilson(value, trials) if trials else (value, value)))
    if not points:
        return empty("Held-out accuracy", "Not evaluated.")
    note = f"With 95% intervals from {trials} samples." if trials else ""
    return figure("Held-out accuracy", note, _intervals(points))


def _intervals(points: Sequence[tuple[str, str, float, tuple[float, float]]]) -> Markup:
    width, height, left, right, top = 520.0, 236.0, 62.0, 28.0, 12.0
    bottom = height - 38
    low = max(0.0, min(bounds[0] for *_, bounds in points) - 0.08)
    high = min(1.0, max(bounds[1] for *_, bounds in points) + 0.08)

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (width - left - right)

    marks: list[Child] = []
    for value in ticks(low, high, 6):
        at = x(value)
        marks.append(element("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid"))
        marks.append(element("text", percent(value), x=at, y=bottom + 15, class_="tick mid"))
    for index, (name, style, value, bounds) in enumerate(points):
        y = top + (bottom - top) * (index + 0.5) / len(points)
        told = f"{name}: {percent(value, 1)} ({percent(bounds[0], 1)} to {percent(bounds[1], 1)})"
        marks.append(element("text", name, x=left - 12, y=y + 4, class_="lane end"))
        bar = element(
            "path",
            d=f"M{x(bounds[0]):.1f} {y - 6:.1f}v12M{x(bounds[0]):.1f} {y:.1f}H{x(bounds[1]):.1f}"
            f"M{x(bounds[1]):.1f} {y - 6:.1f}v12",
        )
        dot = element("circle", cx=x(value), cy=y, r=6)
        marks.append(element("g", element("title", told), bar, dot, class_=f"line {style}"))
        marks.append(
            element("text", percent(value, 1), x=x(value), y=y - 14, class_="value-label mid")
        )
    marks.append(
        element("text", "accuracy", x=(left + width - right) / 2, y=height - 5, class_="label mid")
    )
    return element(
        "svg", marks, viewBox=f"0 0 {width:.0f} {height:.0f}", role="img", aria_label="accuracy"
    )


def work(data: RunData) -> Markup:
    """Tokens, staleness, time per step, throughput."""
    steps = data.step_numbers()
    generated = growth(data.column(lambda step: step.tokens.generated))
    accepted = growth(data.column(lambda step: step.tokens.accepted))
    drawn = [
        None if all_ is None else max(0.0, all_ - (kept or 0.0))
        for all_, kept in zip(generated, accepted, strict=True)
    ]
    train, wait = (
        data.column(lambda step: step.times.train_seconds),
        data.column(lambda step: step.times.wait_seconds),
    )
    other = [
        None if whole is None else max(0.0, whole - (a or 0.0) - (b or 0.0))
        for whole, a, b in zip(
            data.column(lambda step: step.step_seconds), train, wait, strict=True
        )
    ]
    verified = growth(data.column(lambda step: step.tokens.verified))
    rejected = growth(data.column(lambda step: step.tokens.rejected))
    plots = [
        bar_plot(
            "Rollout tokens, reused and generated",
            steps,
            [Series("accepted drafts", accepted, "c3"), Series("drawn one by one", drawn, "c6")],
            note="Response tokens between one finished step and the next.",
            y_label="tokens",
        ),
        line_plot(
            "Staleness",
            steps,
            [
                Series("mean", data.column(lambda step: step.staleness.mean), "c1"),
                Series("largest", data.column(lambda step: step.staleness.max), "c2"),
            ],
            note="Optimizer steps between the policy that a token follows and the one trained.",
            y_label="steps",
            y_limits=(0.0, None),
        ),
        bar_plot(
            "Where the time of a step goes",
            steps,
            [
                Series("training", train, "c2"),
                Series("waiting for samples", wait, "c6"),
                Series("everything else", other, "c4"),
            ],
            note="Seconds from one finished step to the next, seen by the trainer.",
            y_label="seconds",
        ),
        line_plot(
            "Throughput",
            steps,
            [Series("tokens per second", data.column(lambda step: step.tokens_per_second), "c1")],
            note="Response tokens per second, all generators together.",
            y_label="tokens per second",
            y_limits=(0.0, None),
        ),
    ]
    if any(verified) or any(rejected):
        plots.insert(
            1,
            bar_plot(
                "Tokens of older policies, verified",
                steps,
                [Series("kept", verified, "c3"), Series("written again", rejected, "c2")],
                note="What was written ahead of its policy, and whether that policy accepts it.",
                y_label="tokens",
            ),
        )
    return section(
        "Work",
        "What the rollouts cost, how much of them the cache supplied, and how old the tokens were "
        "when they were trained on. Point at a step for its numbers.",
        element("div", plots, class_="grid"),
    )


@dataclass(frozen=True, slots=True)
class _Internal:
    """One plot of a number that says how healthy the training is."""

    value: Callable[[StepMetrics], Measured]
    title: str
    style: str
    unit: str
    note: str
    from_zero: bool = True


_INTERNALS = (
    _Internal(
        lambda step: step.mismatch.fresh_abs_mean,
        "Engine against trainer",
        "c5",
        "nats",
        "Mean absolute difference of the two log-probabilities of the same token.",
    ),
    _Internal(
        lambda step: step.batch.response_length_mean,
        "Response length",
        "c4",
        "tokens",
        "Mean over the step's samples.",
        from_zero=False,
    ),
    _Internal(
        lambda step: step.learning.entropy,
        "Entropy",
        "c3",
        "nats",
        "Mean over tokens, of the policy in training.",
    ),
    _Internal(
        lambda step: step.learning.loss,
        "Loss",
        "c1",
        "",
        "Before the optimizer's step.",
        from_zero=False,
    ),
    _Internal(lambda step: step.learning.grad_norm, "Gradient norm", "c1", "", "Before clipping."),
    _Internal(
        lambda step: step.mismatch.kl,
        "Distance from the behaviour policy",
        "c2",
        "nats",
        "Estimated per token.",
        from_zero=False,
    ),
    _Internal(
        lambda step: step.learning.reward_std,
        "Spread of rewards",
        "c4",
        "",
        "Standard deviation of a step's samples.",
    ),
    _Internal(
        lambda step: step.learning.learning_rate,
        "Learning rate",
        "c6",
        "",
        "Of the optimizer's step.",
    ),
)


def _signal(name: str) -> Callable[[StepMetrics], Measured]:
    return lambda step: step.algorithm.get(name)


def _signals(data: RunData) -> list[_Internal]:
    """A plot for each signal that the algorithm reports."""
    names = {name: None for step in data.steps for name in step.algorithm}
    return [
        _Internal(
            _signal(name),
            name.replace("_", " ").capitalize(),
            "c2",
            "",
            "Reported by the algorithm.",
            from_zero=False,
        )
        for name in names
    ]


def internals(data: RunData) -> Markup | None:
    """How healthy the training is; only what was recorded."""
    plots = []
    for one in (*_INTERNALS, *_signals(data)):
        values = data.column(one.value)
        if any(value is not None for value in values):
            plots.append(
                line_plot(
                    one.title,
                    data.step_numbers(),
                    [Series(one.title.lower(), values, one.style)],
                    note=one.note,
                    y_label=one.unit,
                    y_limits=(0.0 if one.from_zero else None, None),
                )
            )
    if not plots:
        return None
    return section(
        "Health of the training",
        "The difference between engine and trainer should stay near zero: it shows that both mean "
        "the same policy.",
        element("div", plots, class_="grid"),
    )


def samples(data: RunData) -> Markup | None:
    """A few trajectories, token by token."""
    chosen = choose_samples(data.samples, data.shown_samples)
    if not chosen:
        return None
    cards = [sample_card(record) for record in reversed(chosen)]
    rest = cards[OPEN_SAMPLES:]
    more = element(
        "details", element("summary", f"{len(rest)} more from earlier in the run"), *rest
    )
    return section(
        "Sample trajectories",
        "Newest first. Every token shows how it came to be; point at one for its probability.",
        samples_legend(),
        *cards[:OPEN_SAMPLES],
        more if rest else None,
    )


def settings(data: RunData) -> Markup | None:
    """The configuration as it was resolved."""
    if not data.config_text:
        return None
    lines: list[Child] = []
    for line in data.config_text.splitlines():
        match = re.match(r"^([\s-]*)([\w.-]+)(:)(\s.*)?$", line)
        if match:
            indent, key, colon, value = match.groups()
            lines += [indent, element("b", key, class_="c1"), colon, value or "", "\n"]
        else:
            lines.append(line + "\n")
    return section(
        "Configuration",
        "Complete: run it again with `asyncrl run config.yaml`.",
        element("details", element("summary", "config.yaml"), element("pre", lines)),
    )
