"""The report's section on work: tokens, staleness, and the time of a step."""

from asyncrl.monitoring.report.data import RunData
from asyncrl.monitoring.report.markup import Markup, element
from asyncrl.monitoring.report.plots import Series, bar_plot, line_plot
from asyncrl.monitoring.report.sections import section
from asyncrl.monitoring.report.series import growth, less


def work(data: RunData) -> Markup:
    """Tokens, staleness, time per step and throughput."""
    parts = (_tokens, _verification, _staleness, _step_time, _throughput)
    return section(
        "Work",
        "What the rollouts cost, how many of their tokens came from the cache, and how old the "
        "tokens were when they were trained on. Point at a step for its numbers.",
        element("div", [part(data) for part in parts], class_="grid"),
    )


def _tokens(data: RunData) -> Markup:
    generated = growth(data.column(lambda step: step.tokens.generated))
    accepted = growth(data.column(lambda step: step.tokens.accepted))
    drafts = Series("accepted drafts", accepted, "c3")
    layers = [drafts, Series("sampled one by one", less(generated, accepted), "c6")]
    note = "Response tokens generated between one finished step and the next."
    return bar_plot("Rollout tokens", data.step_numbers(), layers, note=note, y_label="tokens")


def _verification(data: RunData) -> Markup | None:
    kept = growth(data.column(lambda step: step.tokens.verified))
    rejected = growth(data.column(lambda step: step.tokens.rejected))
    if not any(kept) and not any(rejected):
        return None
    layers = [Series("kept", kept, "c3"), Series("regenerated", rejected, "c2")]
    note = "Tokens that an older policy generated, and whether verification accepted them."
    return bar_plot("Verified tokens", data.step_numbers(), layers, note=note, y_label="tokens")


def _staleness(data: RunData) -> Markup:
    mean = Series("mean", data.column(lambda step: step.staleness.mean), "c1")
    lines = [mean, Series("maximum", data.column(lambda step: step.staleness.max), "c2")]
    note = "Age of the trained tokens: optimizer steps since the policy that they follow."
    steps = data.step_numbers()
    return line_plot("Staleness", steps, lines, note=note, y_label="steps", y_limits=(0.0, None))


def _step_time(data: RunData) -> Markup:
    training = data.column(lambda step: step.times.train_seconds)
    waiting = data.column(lambda step: step.times.wait_seconds)
    whole = data.column(lambda step: step.step_seconds)
    rest = Series("everything else", less(whole, training, waiting), "c4")
    parts = [Series("training", training, "c2"), Series("waiting for samples", waiting, "c6"), rest]
    note, steps = "The trainer's time from one finished step to the next.", data.step_numbers()
    return bar_plot("Where the time of a step goes", steps, parts, note=note, y_label="seconds")


def _throughput(data: RunData) -> Markup:
    unit, steps = "tokens per second", data.step_numbers()
    lines = [Series(unit, data.column(lambda step: step.tokens_per_second), "c1")]
    note = "Response tokens generated per second by all generators together."
    return line_plot("Throughput", steps, lines, note=note, y_label=unit, y_limits=(0.0, None))
