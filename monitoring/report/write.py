"""Writes `report.html`, a run on one self-contained page; the top of the page is made here."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from asyncrl.monitoring.metrics.occupancy import EMPTY, slot_shares
from asyncrl.monitoring.records.group_account import account_of
from asyncrl.monitoring.records.spans import absent_seconds, idle_by_cause
from asyncrl.monitoring.report.data import RunData, load_run
from asyncrl.monitoring.report.health import health
from asyncrl.monitoring.report.learning import learning
from asyncrl.monitoring.report.markup import Child, Markup, element, page
from asyncrl.monitoring.report.sections import orders, samples, settings
from asyncrl.monitoring.report.series import difference_interval, mean
from asyncrl.monitoring.report.time_line import time_line, training_window, whole_window
from asyncrl.monitoring.report.work import work
from asyncrl.monitoring.terminal.evaluation_text import incomplete
from asyncrl.monitoring.terminal.formatting import UNKNOWN, count, duration, number, percent
from asyncrl.wire.records.evaluations import accuracy_of, graded_reward_of
from asyncrl.wire.records.noise_floor import NoiseFloor
from asyncrl.wire.records.step import Measured, StepMetrics
from asyncrl.wire.transport.atomic_files import write_atomically

LENIENT = (
    "Lenient reuse (cache.reuse: lenient): samples began with tokens of earlier epochs, which were "
    "kept more often than the policy would generate them. By version their staleness is 0, but "
    "they do NOT follow the policy that was trained on them: these rollouts are biased "
    "(docs/exactness.md)."
)


def headline(data: RunData) -> list[Child]:
    """Name, one sentence, the main settings, warnings, and a tile for each number."""
    return [
        element("div", "asyncrl run report", class_="eyebrow"),
        element("h1", data.name),
        element("p", sentence(data), class_="lead"),
        element("div", _main_settings(data), class_="facts"),
        element("p", LENIENT, class_="note") if data.lenient else None,
        [element("p", text, class_="note") for text in _wrong_policy(data)],
        [element("p", note, class_="note") for note in data.notes],
        element("div", *_tiles(data), class_="tiles"),
    ]


def sentence(data: RunData) -> str:
    """Describe the run in one sentence."""
    before, after = data.accuracies()
    steps, wall = data.steps_done, _wall_seconds(data)
    extent = f"{steps} optimizer step{'' if steps == 1 else 's'}"
    if wall is not None:
        extent += f" and {duration(wall)}"
    if data.result is None:
        planned = data.setting("run.steps")
        total = f" of {planned}" if isinstance(planned, int) else ""
        done = f"{steps}{total} step{'' if steps == 1 and not total else 's'}"
        known = data.newest_evaluation is not None
        accuracy = f" Held-out accuracy so far: {data.course()}." if known else ""
        return (
            f"This run has not finished. Its records end after {done}, and the "
            f"numbers below are those so far.{accuracy}"
        )
    if before is None or after is None:
        return f"The run took {extent}."
    if after == before:
        return f"Held-out accuracy stayed at {percent(after, 1)} in {extent}."
    verb = "rose" if after > before else "fell"
    return f"Held-out accuracy {verb} from {percent(before, 1)} to {percent(after, 1)} in {extent}."


def _findings(data: RunData) -> list[str]:
    if data.result is not None:
        return list(data.result.wrong_policy)
    return [text for step in data.steps for text in step.wrong_policy]


def _wrong_policy(data: RunData) -> list[str]:
    """Warn if a generator sampled from another policy than the one being trained."""
    found = _findings(data)
    if not found:
        return []
    more = " (not the only such finding: result.json lists more)" if len(found) > 1 else ""
    what = "The run ended before it trained on such tokens"
    if data.setting("run.on_wrong_policy") == "warn":
        what = "Its tokens were trained on, so the run is not on-policy"
    return [f"Wrong policy: {found[0]}{more}. {what}."]


def _wrong_or_lenient(data: RunData) -> str:
    updates = max((step.learning.optimizer_steps for step in data.steps), default=1)
    if updates > 1:
        return f"on-policy for the first of {updates:,} updates per step at most"
    settings = "lenient reuse or a sample deadline"
    if not _findings(data):
        return settings
    deadline = data.setting("scheduler.sample_deadline_seconds") is not None
    return f"{settings}, and a wrong policy" if data.lenient or deadline else "a wrong policy"


def staleness(data: RunData) -> tuple[float | None, float | None]:
    """Mean and maximum over the run's trained tokens, in optimizer steps, if known."""
    if data.result is not None:
        return data.result.staleness.mean, data.result.staleness.max
    average = mean(data.column(lambda step: step.staleness.mean))
    return average, max((step.staleness.max for step in data.steps), default=None)


def empty_slots(data: RunData) -> float | None:
    """Share of the generators' slot time in the training phase in which slots were empty."""
    if not data.slots or not data.timelines:
        return None
    training = training_window(data, whole_window(data.timelines))
    pieces = [piece for generator in data.slots.values() for piece in generator]
    shares = slot_shares(pieces, training.start, training.end)
    return sum(shares.get(use, 0.0) for use in EMPTY) if shares else None


def _main_settings(data: RunData) -> list[Child]:
    settings = (
        ("engine", data.setting("engine.kind") if data.result is None else data.result.engine),
        ("algorithm", data.setting("trainer.algorithm")),
        ("environment", data.setting("environment.name")),
        ("on update", data.setting("scheduler.on_update")),
        ("off-policy steps allowed", data.setting("scheduler.max_off_policy_steps")),
        ("run-ahead", (str(data.steps[-1].run_ahead) or None) if data.steps else None),
        ("learning rate", data.setting("trainer.learning_rate")),
        ("reuse", "lenient, biased" if data.lenient else None),
    )
    known = [(name, str(value)) for name, value in settings if value is not None]
    return [element("span", f"{name} ", element("b", value)) for name, value in known]


def _wall_seconds(data: RunData) -> float | None:
    if data.result is not None:
        return data.result.wall_seconds
    return data.steps[-1].wall_seconds if data.steps else None


def _tile(name: str, value: Child, details: str, *, hero: bool = False) -> Markup:
    return element(
        "div",
        element("div", name, class_="name"),
        element("div", value, class_="value"),
        element("div", details, class_="more"),
        class_="tile hero" if hero else "tile",
    )


def _tiles(data: RunData) -> list[Markup]:
    tiles = (_accuracy_tile, _time_tile, _throughput_tile, _staleness_tile, _verification_tile)
    more = (_reuse_tile, _idle_tile)
    return [*(tile(data) for tile in tiles + more), *_groups_tile(data), *_noise_floor_tile(data)]


def _accuracy_tile(data: RunData) -> Markup:
    before, after = data.accuracies()
    trials = data.trials()
    arrow = element("span", "→", class_="arrow")
    lacks = [text for one in data.evaluations if one.when != "during" and (text := incomplete(one))]
    details = "not measured" if before is None else "not measured after training"
    details = "; ".join(lacks) or details
    if before is not None and after is not None:
        details = f"{100 * (after - before):+.1f} points"
        if trials is not None and 0 <= before <= 1 and 0 <= after <= 1:
            low, high = difference_interval(before, after, trials)
            details += f", 95% interval {100 * low:+.1f} to {100 * high:+.1f}"
            details += f", {data.held_out}"
    newest, now = data.newest_evaluation, "after"
    if after is None and newest is not None:
        after, now = accuracy_of(newest), f"step {newest.step}"
    if (reward := graded_reward_of(newest)) is not None:
        details += f"; mean reward {reward:.3f}"
    value: list[Child] = [percent(before, 1), arrow, percent(after, 1)]
    return _tile(f"held-out accuracy, before → {now}", value, details, hero=True)


def _time_tile(data: RunData) -> Markup:
    steps, planned = data.steps_done, data.setting("run.steps")
    details = f"{steps} of {planned} planned steps" if planned else f"{steps} steps"
    each = mean(data.column(lambda step: step.step_seconds))
    if each is not None:
        details += f", {duration(each)} each"
    return _tile("training time", duration(_wall_seconds(data)), details)


def _throughput_tile(data: RunData) -> Markup:
    generated, wall = data.tokens().generated, _wall_seconds(data)
    rate = mean(data.column(lambda step: step.tokens_per_second))
    if rate is None and wall:
        rate = generated / wall
    return _tile("tokens per second", count(rate), f"{count(generated)} response tokens in total")


def _staleness_tile(data: RunData) -> Markup:
    average, largest = staleness(data)
    if largest != 0:
        details = f"steps on average, {number(largest, 0)} at most"
        return _tile("staleness", number(average), details)
    steps = data.on_policy_steps()
    details = "exactly on-policy: every token follows the trained policy, nothing to correct"
    if steps.no:
        details = (
            f"by version only: {count(steps.no)} of {count(data.steps_done)} steps are not "
            f"on-policy ({_wrong_or_lenient(data)})"
        )
    elif steps.unknown:
        details = (
            f"by version; the records of {count(steps.unknown)} steps do not say whether they were "
            "exactly on-policy"
        )
    return _tile("staleness", "0", details)


def _verification_tile(data: RunData) -> Markup:
    kept, rejected = data.tokens().verified, data.tokens().rejected
    name = "kept by verification"
    if not kept + rejected:
        return _tile(name, UNKNOWN, "no token of an older policy was verified")
    details = f"of {count(kept + rejected)} tokens verified; {count(rejected)} regenerated"
    generated = data.tokens().generated
    if generated:
        details += f", {percent(rejected / generated, 1)} of all generated"
    return _tile(name, percent(kept / (kept + rejected)), details)


def _reuse_tile(data: RunData) -> Markup:
    generated, reused = data.tokens().generated, data.tokens().accepted
    share = reused / generated if generated else None
    return _tile("reused tokens", percent(share), f"{count(reused)} came from accepted drafts")


def _idle_tile(data: RunData) -> Markup:
    details = "of their time"
    empty = empty_slots(data)
    if empty is not None:
        details += f"; {percent(empty)} of slot time is empty"
    ranks = data.setting("trainer.ranks")
    if isinstance(ranks, int) and ranks > 1 and data.steps:
        lost = sum(step.times.rank_idle_seconds for step in data.steps)
        share = lost / max(1e-9, sum(step.step_seconds for step in data.steps))
        details += f"; the trainer's ranks wait {percent(share)} for each other"
    generators = percent(_idle(data, "generator", lambda step: step.idle.generator))
    trainer = percent(_idle(data, "trainer", lambda step: step.idle.trainer))
    value: list[Child] = [generators, element("span", "·", class_="arrow"), trainer]
    return _tile("idle: generators · trainer", value, details)


def _groups_tile(data: RunData) -> list[Markup]:
    per_step = data.setting("scheduler.groups_per_step")
    if not isinstance(per_step, int) or not any(step.groups.trained for step in data.steps):
        return []
    is_dynamic = data.setting("scheduler.dynamic_sampling.enabled") is True
    account = account_of(data.steps, None if is_dynamic else per_step)
    details = "each trained on exactly once"
    if not account.is_exact:
        details = f"{count(len(account.lost))} lost, {count(len(account.twice))} trained on twice"
    if account.without_signal:
        details += f"; {count(account.without_signal)} more carried no signal and were left out"
    if account.failed:
        details += f"; {count(len(account.failed))} more failed and were left out"
    return [_tile("groups", count(account.trained), details)]


def _noise_floor_tile(data: RunData) -> list[Markup]:
    measured = data.steps[-1].noise_floor if data.steps else NoiseFloor()
    if measured.share is None:
        return []
    details = f"rejected under unchanged weights, of {count(measured.judged)} tokens verified again"
    return [_tile("noise floor", percent(measured.share, 2), details)]


def _idle(data: RunData, role: str, recorded: Callable[[StepMetrics], Measured]) -> float | None:
    """Mean idle share of a role's processes in the training phase; `recorded` without timelines."""
    lanes = [spans for name, spans in data.timelines.items() if name.startswith(role)]
    if not lanes:
        return mean(data.column(recorded))
    training = training_window(data, whole_window(data.timelines))
    start, end = training.start, training.end
    absent = absent_seconds(data.timelines.values(), start, end)
    return mean([sum(idle_by_cause(one, start, end, absent=absent).values()) for one in lanes])


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path. Raises ReportError if it is not a run's."""
    text = render(load_run(run_dir), written=datetime.now(UTC))  # noqa: TID251 - for the reader
    path = run_dir / "report.html"
    write_atomically(path, text)
    return path


def render(data: RunData, written: datetime) -> str:
    """Render the report as HTML; its last line gives the time `written`."""
    body: list[Child] = [headline(data), learning(data), time_line(data), work(data)]
    body += [samples(data), health(data), orders(data), settings(data)]
    body.append(element("footer", f"Written {written:%d %B %Y, %H:%M} UTC by asyncrl."))
    return page(f"{data.name} · asyncrl", body)
