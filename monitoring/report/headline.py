"""The top of the report: the run's name, one sentence, and the numbers that matter most."""

from __future__ import annotations

from monitoring.occupancy import SlotUse, slot_shares
from monitoring.report.data import RunData
from monitoring.report.markup import Child, Markup, element
from monitoring.report.series import difference_interval, mean
from monitoring.report.windows import training_window, whole_window
from monitoring.wording import UNKNOWN, count, duration, number, percent

LENIENT = (
    "Lenient reuse (cache.reuse: lenient): samples began with tokens of earlier epochs, kept more "
    "often than the policy would say them. Their staleness is 0 by version, but they do NOT follow "
    "the policy that was trained on them: these rollouts are biased (docs/exactness.md)."
)


def headline(data: RunData) -> list[Child]:
    """Name, one sentence, settings that matter, and the numbers."""
    return [
        element("div", "asyncrl run report", class_="eyebrow"),
        element("h1", data.name),
        element("p", sentence(data), class_="lead"),
        element("div", _facts(data), class_="facts"),
        element("p", LENIENT, class_="note") if data.lenient else None,
        [element("p", note, class_="note") for note in data.notes],
        element("div", *_tiles(data), class_="tiles"),
    ]


def sentence(data: RunData) -> str:
    """The run in one sentence."""
    before, after = data.outcome("accuracy_before"), data.outcome("accuracy_after")
    steps, wall = _steps_done(data), _wall_seconds(data)
    took = f"{steps} optimizer step{'' if steps == 1 else 's'}"
    if wall is not None:
        took += f" and {duration(wall)}"
    if data.result is None:
        planned = data.setting("run.steps")
        of = f" of {planned}" if isinstance(planned, int) else ""
        return (
            f"This run has not finished: its records end after step {steps}{of}. "
            "The numbers are as of then."
        )
    if before is None or after is None:
        return f"The run took {took}."
    verb = "rose" if after > before else "fell" if after < before else "stayed"
    return f"Held-out accuracy {verb} from {percent(before, 1)} to {percent(after, 1)} in {took}."


def _facts(data: RunData) -> list[Child]:
    settings = (
        ("engine", (data.result or {}).get("engine") or data.setting("engine.kind")),
        ("algorithm", data.setting("trainer.algorithm")),
        ("on update", data.setting("scheduler.on_update")),
        ("off-policy steps allowed", data.setting("scheduler.max_off_policy_steps")),
        ("learning rate", data.setting("trainer.learning_rate")),
        ("reuse", "lenient, biased" if data.lenient else None),
    )
    return [
        element("span", f"{name} ", element("b", str(value)))
        for name, value in settings
        if value is not None
    ]


def _steps_done(data: RunData) -> int:
    steps = data.outcome("steps")
    if steps is not None:
        return int(steps)
    return data.steps[-1].step + 1 if data.steps else 0


def _wall_seconds(data: RunData) -> float | None:
    wall = data.outcome("wall_seconds")
    if wall is None and data.steps:
        return data.steps[-1].wall_seconds
    return wall


def _tile(name: str, value: Child, more: str, *, hero: bool = False) -> Markup:
    return element(
        "div",
        element("div", name, class_="name"),
        element("div", value, class_="value"),
        element("div", more, class_="more"),
        class_="tile hero" if hero else "tile",
    )


def _tiles(data: RunData) -> list[Markup]:
    steps, wall = _steps_done(data), _wall_seconds(data)
    generated, reused = _tokens(data)
    step_seconds = mean(data.column(lambda step: step.step_seconds))
    rate = mean(data.column(lambda step: step.tokens_per_second))
    if rate is None and generated is not None and wall:
        rate = generated / wall
    planned = data.setting("run.steps")
    share = reused / generated if reused is not None and generated else None
    took = f"{steps} of {planned} planned steps" if planned else f"{steps} steps"
    if step_seconds is not None:
        took += f", {duration(step_seconds)} each"
    return [
        _accuracy_tile(data),
        _tile("wall time", duration(wall), took),
        _tile("tokens per second", count(rate), f"{count(generated)} response tokens in all"),
        _staleness_tile(data),
        _verified_tile(data, generated),
        _tile("reused tokens", percent(share), f"{count(reused)} came from accepted drafts"),
        _idle_tile(data),
    ]


def _staleness_tile(data: RunData) -> Markup:
    stale, worst = staleness(data)
    if worst == 0:
        if data.lenient:
            return _tile("staleness", "0", "by version only: lenient reuse is not on-policy")
        if data.setting("scheduler.sample_deadline_seconds") is not None:
            return _tile("staleness", "0", "but a deadline may have cut samples: see the settings")
        return _tile("staleness", "0", "exactly on-policy: no token of an older policy")
    return _tile("staleness", number(stale), f"steps in the mean, {number(worst, 0)} at most")


def staleness(data: RunData) -> tuple[float | None, float | None]:
    """Mean and largest over the run's trained tokens, in optimizer steps; None: not known."""
    stale, worst = data.outcome("staleness_mean"), data.outcome("staleness_max")
    if stale is None:
        stale = mean(data.column(lambda step: step.staleness.mean))
    if worst is None:
        worst = max(
            (v for v in data.column(lambda step: step.staleness.max) if v is not None), default=None
        )
    return stale, worst


def _verified_tile(data: RunData, generated: float | None) -> Markup:
    kept, again = data.tokens().verified, data.tokens().rejected
    name = "of older policies, kept"
    if not kept + again:
        return _tile(name, UNKNOWN, "nothing of an older policy was verified")
    more = f"of {count(kept + again)} tokens verified; {count(again)} written again"
    if generated:
        more += f", {percent(again / generated, 1)} of all written"
    return _tile(name, percent(kept / (kept + again)), more)


def _idle_tile(data: RunData) -> Markup:
    generators = percent(mean(data.column(lambda step: step.idle.generator)))
    trainer = percent(mean(data.column(lambda step: step.idle.trainer)))
    more = "of their time"
    empty = empty_slots(data)
    if empty is not None:
        more += f"; {percent(empty)} of slot time is empty"
    value: list[Child] = [generators, element("span", "·", class_="arrow"), trainer]
    return _tile("idle: generators · trainer", value, more)


def empty_slots(data: RunData) -> float | None:
    """Share of the generators' slot time, over the training phase, in which slots stood empty."""
    if not data.slots or not data.timelines:
        return None
    start, end = training_window(data, whole_window(data.timelines))
    pieces = [piece for each in data.slots.values() for piece in each]
    shares = slot_shares(pieces, start, end)
    return shares.get(SlotUse.IDLE.value, 0.0) if shares else None


def _tokens(data: RunData) -> tuple[float | None, float | None]:
    generated, reused = data.outcome("tokens_generated"), data.outcome("tokens_reused")
    return (
        data.tokens().generated if generated is None else generated,
        data.tokens().accepted if reused is None else reused,
    )


def _accuracy_tile(data: RunData) -> Markup:
    before, after = data.outcome("accuracy_before"), data.outcome("accuracy_after")
    trials = data.evaluation_samples()
    value: list[Child] = [
        percent(before, 1),
        element("span", "→", class_="arrow"),
        percent(after, 1),
    ]
    more = "not measured"
    if before is not None and after is not None:
        more = f"{100 * (after - before):+.1f} points"
        if trials is not None and 0 <= before <= 1 and 0 <= after <= 1:
            low, high = difference_interval(before, after, trials)
            more += (
                f", 95% interval {100 * low:+.1f} to {100 * high:+.1f}, {trials} held-out samples"
            )
    return _tile("accuracy on held-out questions, before → after", value, more, hero=True)
