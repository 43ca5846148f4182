"""The report's section on the health of the training: numbers that reveal defects."""

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.monitoring.report.data import RunData
from asyncrl.monitoring.report.markup import Markup, element
from asyncrl.monitoring.report.plots import Series, line_plot
from asyncrl.monitoring.report.sections import section
from asyncrl.wire.records.step import Measured, StepMetrics


@dataclass(frozen=True, slots=True)
class _Indicator:
    title: str
    value: Callable[[StepMetrics], Measured]
    note: str
    style: str = "c1"
    unit: str = ""
    from_zero: bool = True


_INDICATORS = (
    _Indicator(
        "Engine against trainer",
        lambda step: step.mismatch.fresh_abs_mean,
        "Mean absolute difference of the two log-probabilities of the same token.",
        "c5",
        "nats",
    ),
    _Indicator(
        "Response length",
        lambda step: step.batch.response_length_mean,
        "Mean over the step's samples.",
        "c4",
        "tokens",
        from_zero=False,
    ),
    _Indicator(
        "Samples cut off",
        lambda step: step.batch.truncated_share,
        "Share that the token limit or a deadline ended.",
        "c4",
    ),
    _Indicator(
        "Groups without signal",
        lambda step: step.signalless_share,
        "Share of the groups that each step looked at: nothing is learned from them.",
        "c4",
    ),
    _Indicator(
        "Entropy",
        lambda step: step.learning.entropy,
        "Of the policy in training, mean over tokens.",
        "c3",
        "nats",
    ),
    _Indicator(
        "Loss", lambda step: step.learning.loss, "Before the optimizer's step.", from_zero=False
    ),
    _Indicator("Gradient norm", lambda step: step.learning.grad_norm, "Before clipping."),
    _Indicator(
        "KL divergence from the behaviour policy",
        lambda step: step.mismatch.kl,
        "Estimated per token.",
        "c2",
        "nats",
        from_zero=False,
    ),
    _Indicator(
        "Standard deviation of rewards",
        lambda step: step.learning.reward_std,
        "Over the step's samples.",
        "c4",
    ),
    _Indicator(
        "Learning rate", lambda step: step.learning.learning_rate, "Of the optimizer's step.", "c6"
    ),
)


def health(data: RunData) -> Markup | None:
    """A plot of each indicator that was recorded, if any."""
    plots, steps = [], data.step_numbers()
    for one in (*_INDICATORS, *_signals(data)):
        values = data.column(one.value)
        if any(value is not None for value in values):
            line = Series(one.title.lower(), values, one.style)
            ends = 0.0 if one.from_zero else None, None
            about = {"note": one.note, "y_label": one.unit}
            plots.append(line_plot(one.title, steps, [line], y_limits=ends, **about))
    if not plots:
        return None
    return section(
        "Health of the training",
        "The difference between engine and trainer should stay near zero: it shows that both "
        "compute the same policy.",
        element("div", plots, class_="grid"),
    )


def _signals(data: RunData) -> list[_Indicator]:
    names = {name: None for step in data.steps for name in step.algorithm}
    note = "Reported by the algorithm."
    return [
        _Indicator(name.replace("_", " ").capitalize(), _signal(name), note, "c2", from_zero=False)
        for name in names
    ]


def _signal(name: str) -> Callable[[StepMetrics], Measured]:
    return lambda step: step.algorithm.get(name)
