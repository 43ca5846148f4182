"""The report's section on learning: the reward of each step, and the held-out accuracy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.monitoring.report.data import RunData
from asyncrl.monitoring.report.markup import Child, Markup, element
from asyncrl.monitoring.report.plots import (
    BOTTOM,
    HEIGHT,
    LEFT,
    TOP,
    WIDTH,
    Series,
    empty,
    figure,
    line_plot,
)
from asyncrl.monitoring.report.sections import section
from asyncrl.monitoring.report.series import smooth, ticks
from asyncrl.monitoring.terminal.evaluation_text import incomplete
from asyncrl.monitoring.terminal.formatting import brief, counted, percent
from asyncrl.wire.records.evaluations import SetEvaluation, wilson
from asyncrl.wire.records.reward_counts import RewardCounts
from asyncrl.wire.records.step import EnvironmentCounts, Measured, StepMetrics

Value = Callable[[SetEvaluation], float | None]

_RIGHT = 28
_NAMED = 3


def learning(data: RunData) -> Markup:
    """Rewards and held-out accuracy."""
    temperature = data.setting("evaluation.temperature")
    drawn = "sampled as in training"
    if temperature is not None:
        drawn = f"sampled at temperature {temperature:g}" if temperature else "answered greedily"
    return section(
        "Learning",
        "The reward is that of the samples that each step trained on. Accuracy is measured on "
        f"held-out prompts, {drawn}.",
        _failures(data),
        _environment(data),
        _incomplete(data),
        element(
            "div", _reward(data), _terms(data), _evaluation(data), *_by_step(data), class_="grid"
        ),
    )


def _reward(data: RunData) -> Markup:
    if not data.steps:
        return empty("Reward", "No step is finished yet.")
    rewards = data.column(lambda step: step.learning.reward_mean)
    smoothed = Series("smoothed", smooth(rewards), "c1")
    mean = Series("mean of the step", rewards, "c1", faint=True)
    note = "Mean over each step's samples (thin) and its moving average (bold)."
    return line_plot("Reward", data.step_numbers(), [smoothed, mean], note=note, y_label="reward")


def _terms(data: RunData) -> Markup | None:
    names = list({name: None for step in data.steps for name in step.rewards})
    if len(names) < 2:
        return None
    terms = [(name, data.column(_term(name))) for name in names]
    lines = [Series(*term, f"c{1 + index % 6}") for index, term in enumerate(terms)]
    note = "Mean over each step's samples of what each function returned, without its weight."
    return line_plot("Reward by function", data.step_numbers(), lines, note=note, y_label="value")


def _term(name: str) -> Callable[[StepMetrics], Measured]:
    return lambda step: step.rewards.get(name)


def _failures(data: RunData) -> Markup | None:
    failed = data.steps[-1].reward_failures if data.steps else {}
    if data.result is not None:
        failed = data.result.reward_failures
    counts = RewardCounts(failed=failed)
    if not counts.failures:
        return None
    text = (
        f"{counts.failures} rewards failed and counted as 0 in training (rewards.on_error: zero): "
        f"{counts.describe_failures()}."
    )
    return element("p", text, class_="note")


def _incomplete(data: RunData) -> Markup | None:
    texts = [text for one in data.evaluations if (text := incomplete(one)) is not None]
    if not texts:
        return None
    more = len(texts) - _NAMED
    named = "; ".join(texts[:_NAMED]) + (f"; so are {more:,} more" if more > 0 else "")
    return element(
        "p",
        f"The {named}. Their accuracy is unknown: more samples than evaluation.max_unscored_share "
        "allows lack a reward, or all rewards failed.",
        class_="note",
    )


def _environment(data: RunData) -> Markup | None:
    counts = data.steps[-1].environments if data.steps else EnvironmentCounts()
    if not counts.turns:
        return None
    mean = brief(counts.mean_seconds or 0.0)
    samples, threads = counted(counts.started_over, "sample"), counted(counts.hanging, "thread")
    sentences = (
        (counts.turns, f"Environments answered {counts.turns:,} turns, in {mean} each on average."),
        (counts.replayed, (f"{counts.replayed:,} times one was made again and given the accepted "
                           "turns once more.")),
        (counts.restored, f"{counts.restored:,} times one went back by its restore."),
        (counts.started_over, f"{samples} started over, because an environment could not go back."),
        (counts.lost, (f"{counts.lost:,} of them because their worker process had ended: if their "
                       "environment answers at random, samples that take long are a little rarer "
                       "than they should be.")),
        (counts.hanging, f"{threads} of environments or agents hung and were left behind."),
        (counts.calls, (f"Turns called tools {counts.calls:,} times, {counts.wrong_calls:,} of "
                        "them wrongly.")),
    )  # fmt: skip
    text = " ".join(sentence for count, sentence in sentences if count)
    return element("p", text, class_="note" if counts.lost or counts.hanging else "about")


@dataclass(frozen=True, slots=True)
class _Accuracy:
    name: str
    style: str
    value: float
    low: float
    high: float


def _evaluation(data: RunData) -> Markup:
    trials = data.trials()
    accuracies = []
    names = (("before", "c6"), ("after", "c3"))
    for place, ((name, style), value) in enumerate(zip(names, data.accuracies(), strict=True)):
        if value is not None and 0 <= value <= 1:
            low, high = wilson(value, trials[place]) if trials else (value, value)
            accuracies.append(_Accuracy(name, style, value, low, high))
    if not accuracies:
        return empty("Held-out accuracy", "Not evaluated.")
    note = f"With 95% intervals. {data.held_out}." if trials else ""
    return figure("Held-out accuracy", note, _intervals(accuracies))


def _by_step(data: RunData) -> list[Markup]:
    if len(data.evaluations) < 2 or all(one.when != "during" for one in data.evaluations):
        return []
    steps = [float(one.step) for one in data.evaluations]
    names = list({name: None for one in data.evaluations for name in one.sets})

    def plot(title: str, value: Value, note: str, y_label: str = "") -> Markup:
        lines = [
            Series(name, _column(data, name, value), f"c{1 + i % 6}")
            for i, name in enumerate(names)
        ]
        return line_plot(title, steps, lines, note=note, y_label=y_label)

    note = "Each sample was drawn from the policy of its step alone."
    plots = [plot("Held-out accuracy by step", lambda one: one.accuracy, note, "accuracy")]
    if any(
        one.graded_reward is not None for each in data.evaluations for one in each.sets.values()
    ):
        note = "Mean reward of the same samples."
        plots.append(plot("Held-out reward by step", lambda one: one.reward, note))
    last = data.evaluations[-1]
    ks = max((max(one.pass_at, default=1) for one in last.sets.values()), default=1)
    if ks >= 2:
        note = f"Share of prompts of which one of {ks} samples is right, unbiased."
        pass_at = f"pass@{ks}"
        plots.append(plot(f"{pass_at} by step", lambda one: one.pass_at.get(ks), note, pass_at))
    return plots


def _column(data: RunData, name: str, value: Value) -> list[float | None]:
    found = (one.sets.get(name) for one in data.evaluations)
    return [None if one is None else value(one) for one in found]


def _intervals(accuracies: Sequence[_Accuracy]) -> Markup:
    low = max(0.0, min(each.low for each in accuracies) - 0.08)
    high = min(1.0, max(each.high for each in accuracies) + 0.08)
    bottom = HEIGHT - BOTTOM

    def x(value: float) -> float:
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - _RIGHT)

    marks: list[Child] = []
    for value in ticks(low, high, 6):
        marks.append(element("line", x1=x(value), x2=x(value), y1=TOP, y2=bottom, class_="grid"))
        marks.append(element("text", percent(value), x=x(value), y=bottom + 15, class_="tick mid"))
    for index, each in enumerate(accuracies):
        y = TOP + (bottom - TOP) * (index + 0.5) / len(accuracies)
        left, right, middle = x(each.low), x(each.high), x(each.value)
        bar = (
            f"M{left:.1f} {y - 6:.1f}v12M{left:.1f} {y:.1f}H{right:.1f}M{right:.1f} {y - 6:.1f}v12"
        )
        shape = [element("path", d=bar), element("circle", cx=middle, cy=y, r=6)]
        label = percent(each.value, 1)
        title = f"{each.name}: {label} ({percent(each.low, 1)} to {percent(each.high, 1)})"
        marks += [
            element("text", each.name, x=LEFT - 12, y=y + 4, class_="lane end"),
            element("g", element("title", title), shape, class_=f"line {each.style}"),
            element("text", label, x=middle, y=y - 14, class_="value-label mid"),
        ]
    centre = (LEFT + WIDTH - _RIGHT) / 2
    marks.append(element("text", "accuracy", x=centre, y=HEIGHT - 5, class_="label mid"))
    return element(
        "svg", marks, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label="held-out accuracy"
    )
