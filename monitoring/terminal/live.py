"""The live view of a run: a panel in a terminal, lines anywhere else.

    with LiveView(config.monitoring, total_steps=60, run_name="demo") as live:
        live.update(RunView(phase="training", step=3, last=record))
        live.log("checkpoint written")

A stream that is not a terminal gets plain text only: no colours, no cursor movements, no lines
wrapped at eighty columns. `update` may be called as often as there is news. The panel is redrawn
at a fixed rate. Lines are printed when a step is finished, when the phase changes, and at
least every half minute, so that a log never looks dead.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from asyncrl.monitoring.config import MonitoringConfig
from asyncrl.monitoring.terminal.formatting import without_controls
from asyncrl.monitoring.terminal.live_panel import panel, plain_line
from asyncrl.monitoring.terminal.run_view import RunView

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 0.25
QUIET_SECONDS = 30.0
"""Longest time between two lines of the plain view while `update` is called."""
WIDE_COLUMNS = 92
"""Terminals at least this wide get a panel with two columns of numbers."""


class _View(Protocol):
    def update(self, view: RunView) -> None: ...

    def log(self, text: str) -> None: ...

    def close(self) -> None: ...


class LiveView:
    """Shows snapshots of a run as the configuration asks and the terminal allows.

    Args:
        config: `live` chooses the view.
        total_steps: optimizer steps of the whole run.
        run_name: shown in the title.
        console: what to print on; None: standard output.
        clock: monotonic seconds.
        refresh_seconds: between two drawings of the panel.
    """

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
        self._view: _View
        if config.live == "off":
            self._view = _NoView()
        elif terminal and config.live != "plain":
            self._view = _PanelView(console, total_steps, run_name, refresh_seconds)
        else:
            self._view = _PlainView(console, total_steps, run_name, clock)
            if config.live == "rich":
                self._view.log(
                    "monitoring.live is rich, but this is no terminal: printing lines instead"
                )

    def update(self, view: RunView) -> None:
        """Show a newer snapshot."""
        self._show(lambda: self._view.update(view))

    def log(self, text: str) -> None:
        """Print a message that stays on the screen, above the panel or as a line."""
        self._show(lambda: self._view.log(without_controls(text)))

    def close(self) -> None:
        """Leave the last state on the screen and release the terminal. Idempotent."""
        self._show(self._view.close)

    def _show(self, show: Callable[[], None]) -> None:
        """Show something; once the terminal or the pipe is closed, nothing is shown any more."""
        try:
            show()
        except OSError as error:
            logger.warning("the live view ends: its output cannot be written: %s", error)
            self._view = _NoView()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _NoView:
    """The view of `live: off`."""

    def update(self, view: RunView) -> None:
        pass

    def log(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _PanelView:
    """A panel that is redrawn in place."""

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
        self._run_name = without_controls(run_name).replace("\n", " ")
        self._clock = clock
        self._phase = ""
        self._step: int | None = None
        self._printed_at = clock()

    def update(self, view: RunView) -> None:
        phase = re.sub(r"[\d/.%]+", "", view.phase).strip()
        if phase != self._phase:
            self._phase = phase
            self._line(without_controls(view.phase))
        if view.step != self._step:
            first = self._step is None
            self._step = view.step
            if view.step or not first:
                self._line(plain_line(view, self._total_steps))
        if self._clock() - self._printed_at >= QUIET_SECONDS:
            self._line(self._still_running(view))

    def log(self, text: str) -> None:
        self._line(text)

    def close(self) -> None:
        pass

    def _still_running(self, view: RunView) -> str:
        text = f"{without_controls(view.phase)}, step {view.step}/{self._total_steps}"
        if view.waiting_for:
            text += f": {without_controls(view.waiting_for)}"
        return text

    def _line(self, text: str) -> None:
        self._printed_at = self._clock()
        for part in text.splitlines():
            self._stream.write(f"{self._run_name}: {part}\n")
        self._stream.flush()
