"""The live view of a run: a panel in a terminal, plain lines anywhere else."""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.monitoring.config import MonitoringConfig
from asyncrl.monitoring.terminal.completions import completions
from asyncrl.monitoring.terminal.formatting import (
    ON_POLICY,
    UNKNOWN,
    count,
    duration,
    number,
    percent,
    sparkline,
    without_controls,
)
from asyncrl.monitoring.terminal.run_view import RunView
from asyncrl.wire.messages.from_trainer import ShownSample
from asyncrl.wire.records.evaluations import EvaluationRecord, accuracy_of, graded_reward_of
from asyncrl.wire.records.step import StepMetrics

HIGH_IDLE_SHARE = 0.3
"""Idle shares from this on are shown in a warning colour."""
NOTABLE_SHARE = 0.1
"""A wait for rewards is shown if it takes at least this share of a step."""


def panel(view: RunView, *, run_name: str, total_steps: int, wide: bool = True) -> Panel:
    """The panel of a snapshot; `wide` puts the numbers into two columns."""
    waiting: list[RenderableType] = []
    if view.waiting_for:
        waiting = [Text(), Text.assemble(("waiting: ", "yellow"), (_clean(view.waiting_for), ""))]
    body = Group(
        _head(view, total_steps),
        Text(),
        _progress(view, total_steps),
        Text(),
        _numbers(view, wide),
        *waiting,
    )
    title = Text.assemble(("asyncrl", "bold"), ("  ·  ", "dim"), (_clean(run_name), "cyan"))
    return Panel(
        body,
        title=title,
        title_align="left",
        border_style="bright_black",
        box=box.ROUNDED,
        padding=(1, 2),
    )


def _clean(text: str) -> str:
    return without_controls(text).replace("\n", " ")


def _head(view: RunView, total_steps: int) -> RenderableType:
    left = Text(_clean(view.phase), style="bold")
    before_left = "" if view.is_paused else "      left "
    right = Text.assemble(
        (f"{view.step}", "bold"),
        (f" of {total_steps} steps", "dim"),
        (before_left, "dim"),
        "" if view.is_paused else duration(view.eta_seconds),
    )
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1, no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, right)
    return grid


def _progress(view: RunView, total_steps: int) -> RenderableType:
    bar = ProgressBar(
        max(total_steps, 1), min(view.step, total_steps),
        style="grey23", complete_style="cyan", finished_style="green",
    )  # fmt: skip
    line = Table.grid(expand=True)
    line.add_row(bar)
    return line


def _accuracy(view: RunView) -> tuple[str, Text]:
    newest = view.evaluation
    if newest is None or not newest.step:
        return "accuracy before", _share(view.accuracy_before, newest)
    best = "" if view.best_step in (None, newest.step) else f", best {percent(view.best_accuracy)}"
    return f"accuracy {newest.step}", _share(accuracy_of(newest), newest) + Text(best)


def _share(accuracy: float | None, of: EvaluationRecord | None) -> Text:
    if accuracy is None and of is not None and not of.is_complete:
        return Text("incomplete", style="yellow")
    reward = graded_reward_of(of)
    return Text(percent(accuracy, 1) + ("" if reward is None else f", reward {reward:.3f}"))


def _numbers(view: RunView, wide: bool) -> RenderableType:
    last = view.last
    speeds = None if view.is_paused else last
    rate = None if speeds is None else speeds.tokens_per_second
    outcome = [
        ("reward", _reward(view)),
        _accuracy(view),
        ("staleness", _staleness(view)),
        ("drafts accepted", _drafts(view)),
        ("length", _length(last)),
    ]
    flow = [
        ("tokens/s", Text(count(rate), style="bold")),
        ("samples", _samples(view)),
        ("generator idle", _idle(None if speeds is None else speeds.idle.generator)),
        ("trainer idle", _idle(None if speeds is None else speeds.idle.trainer)),
        ("without signal", _silent(last)),
    ]
    if speeds is not None and speeds.idle.for_rewards >= NOTABLE_SHARE:
        flow[3][1].append(f"  waiting for rewards {percent(speeds.idle.for_rewards)}", "yellow")
    grid = Table.grid(expand=True, padding=(0, 2))
    for _ in range(2 if wide else 1):
        grid.add_column(style="dim", no_wrap=True, min_width=15 if wide else None)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    rows = zip(outcome, flow, strict=True) if wide else ((one,) for one in outcome + flow)
    for row in rows:
        grid.add_row(*itertools.chain(*row))
    return grid


def _reward(view: RunView) -> Text:
    reward = None if view.last is None else view.last.learning.reward_mean
    return Text.assemble(
        (number(reward), "" if reward is None else "bold green"),
        "  ",
        (sparkline(view.recent_rewards, 20), "green"),
    )


def _staleness(view: RunView) -> Text:
    if view.last is None:
        return Text(UNKNOWN)
    staleness = view.last.staleness
    text = Text.assemble(number(staleness.mean), ("  at most ", "dim"), f"{staleness.max}")
    if view.exactly_on_policy is not None:
        style = "dim" if view.exactly_on_policy else "yellow"
        text.append(f"  {ON_POLICY[view.exactly_on_policy]}", style=style)
    return text


def _drafts(view: RunView) -> Text:
    if view.draft_acceptance is None and view.drafted_share is None:
        return Text(UNKNOWN)
    return Text.assemble(
        percent(view.draft_acceptance), ("  share of tokens ", "dim"), percent(view.drafted_share)
    )


def _length(last: StepMetrics | None) -> Text:
    if last is None or not last.batch.samples:
        return Text(UNKNOWN)
    cut = percent(last.batch.truncated_share)
    return Text.assemble(count(last.batch.response_length_mean), ("  cut off ", "dim"), cut)


def _silent(last: StepMetrics | None) -> Text:
    if last is None or last.signalless_share is None:
        return Text(UNKNOWN)
    style = "yellow" if last.learned_nothing else ""
    return Text.assemble((percent(last.signalless_share), style), (" of groups", "dim"))


def _samples(view: RunView) -> Text:
    parts = (
        (view.samples_running, "running"),
        (view.samples_in_environments or None, "of them in environments"),
        (view.samples_held, "held"),
        (view.samples_queued, "queued"),
    )
    known = [(value, name) for value, name in parts if value is not None]
    if not known:
        return Text(UNKNOWN)
    return Text("  ").join(Text.assemble(str(value), (f" {name}", "dim")) for value, name in known)


def _idle(share: float | None) -> Text:
    return Text(percent(share), style="yellow" if (share or 0.0) >= HIGH_IDLE_SHARE else "")


def plain_line(view: RunView, total_steps: int) -> str:
    """The line of the plain view for a finished step."""
    parts, last = [f"{view.step}/{total_steps} steps"], view.last
    if last is not None:
        parts += [
            _rewards(last),
            *_learning(last),
            f"{count(last.tokens_per_second)} tokens/s",
            f"staleness {last.staleness.mean:.2f} (max {last.staleness.max})",
        ]
        if view.exactly_on_policy is False:
            parts.append(ON_POLICY[view.exactly_on_policy])
    if view.draft_acceptance is not None:
        parts.append(f"drafts accepted {percent(view.draft_acceptance)}")
    if view.drafted_share is not None:
        parts.append(f"reused {percent(view.drafted_share)}")
    if last is not None:
        idle = last.idle
        parts.append(f"idle generator {percent(idle.generator)} trainer {percent(idle.trainer)}")
        if idle.for_rewards >= NOTABLE_SHARE:
            parts.append(f"waiting for rewards {percent(idle.for_rewards)}")
    if view.eta_seconds is not None:
        parts.append(f"{duration(view.eta_seconds)} left")
    return " | ".join(parts)


def _rewards(step: StepMetrics) -> str:
    """`reward 0.720`, with the mean of each function if there are several."""
    text = f"reward {step.learning.reward_mean:.3f}"
    if len(step.rewards) < 2:
        return text
    return f"{text} ({', '.join(f'{_clean(k)} {number(v, 3)}' for k, v in step.rewards.items())})"


def _learning(step: StepMetrics) -> Iterator[str]:
    """Describe what the step learned from; nothing if it trained on nothing."""
    batch, learning = step.batch, step.learning
    if not batch.samples:
        return
    cut, silent = percent(batch.truncated_share), percent(step.signalless_share)
    yield f"length {count(batch.response_length_mean)}, {cut} cut"
    yield f"{silent} of groups without signal"
    numbers = {
        "entropy": learning.entropy,
        "KL to behaviour": step.mismatch.kl,
        "KL to reference": step.algorithm.get("reference_kl"),
        "grad norm": learning.grad_norm,
    }
    yield ", ".join(f"{name} {value:.2g}" for name, value in numbers.items() if value is not None)


logger = logging.getLogger(__name__)

REFRESH_SECONDS = 0.25
QUIET_SECONDS = 30.0
"""Longest time between two lines of the plain view while `update` is called."""
FILE_COLUMNS = 120
"""Width of tables where there is no terminal."""
WIDE_COLUMNS = 92
"""Terminals at least this wide get a panel with two columns of numbers."""


class LiveView:
    """Shows snapshots of a run as the configuration and the terminal allow."""

    def __init__(
        self,
        config: MonitoringConfig,
        total_steps: int,
        run_name: str,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        refresh_seconds: float = REFRESH_SECONDS,
    ) -> None:
        console = console or Console()
        terminal = console.is_terminal and not console.is_dumb_terminal
        self._view: _PanelView | _PlainView | None = None
        self._width = console.width if terminal else FILE_COLUMNS
        if config.live != "off" and terminal and config.live != "plain":
            self._view = _PanelView(console, total_steps, run_name, refresh_seconds)
        elif config.live != "off":
            self._view = _PlainView(console, total_steps, run_name, clock)
            self._width -= len(run_name) + 2  # which begin each line
            if config.live == "rich":
                self._view.log(
                    "monitoring.live is rich, but this is not a terminal: printing lines instead"
                )

    def update(self, view: RunView) -> None:
        """Show a newer snapshot."""
        self._show(lambda shown: shown.update(view))

    def log(self, text: str) -> None:
        """Print a message that stays on the screen, above the panel or as a line."""
        self._show(lambda shown: shown.log(without_controls(text)))

    def samples(self, shown: Sequence[ShownSample], labels: Sequence[str], step: int) -> None:
        """Print samples of a finished step, if there are any."""
        if shown:
            self.log(completions(shown, labels, step=step, width=self._width))

    def close(self) -> None:
        """Leave the last state on the screen and release the terminal. Idempotent."""
        self._show(lambda shown: shown.close())

    def _show(self, show: Callable[[_PanelView | _PlainView], None]) -> None:
        """Show something, unless the terminal or the pipe was closed."""
        try:
            if self._view is not None:
                show(self._view)
        except OSError as error:
            logger.warning("the live view ends: cannot write its output: %s", error)
            self._view = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class _PanelView:
    def __init__(
        self, console: Console, total_steps: int, run_name: str, refresh_seconds: float
    ) -> None:
        self._total_steps = total_steps
        self._run_name = run_name
        self._console = console
        self._last = RunView()
        self._live = Live(
            console=console,
            refresh_per_second=1 / refresh_seconds,
            get_renderable=self._render,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def _render(self) -> RenderableType:
        wide = self._console.width >= WIDE_COLUMNS
        return panel(self._last, run_name=self._run_name, total_steps=self._total_steps, wide=wide)

    def update(self, view: RunView) -> None:
        self._last = view

    def log(self, text: str) -> None:
        self._console.print(Text(text))

    def close(self) -> None:
        self._live.stop()


class _PlainView:
    """A line per step and per phase, and one after each long silence."""

    def __init__(
        self, console: Console, total_steps: int, run_name: str, clock: Callable[[], float]
    ) -> None:
        self._stream = console.file
        self._total_steps = total_steps
        self._run_name = _clean(run_name)
        self._clock = clock
        self._phase = ""
        self._step: int | None = None
        self._printed_at = clock()

    def update(self, view: RunView) -> None:
        phase = re.sub(r"[\d/.%]+", "", view.phase).strip()
        if phase != self._phase:
            self._phase = phase
            self.log(without_controls(view.phase))
        if view.step != self._step:
            first = self._step is None
            self._step = view.step
            if view.step or not first:
                self.log(plain_line(view, self._total_steps))
        if self._clock() - self._printed_at >= QUIET_SECONDS:
            text = f"{without_controls(view.phase)}, {view.step}/{self._total_steps} steps"
            if view.waiting_for:
                text += f": {without_controls(view.waiting_for)}"
            self.log(text)

    def close(self) -> None:
        pass

    def log(self, text: str) -> None:
        self._printed_at = self._clock()
        for part in text.splitlines():
            self._stream.write(f"{self._run_name}: {part}\n")
        self._stream.flush()
