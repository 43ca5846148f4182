"""Implements `asyncrl watch`: the live view of a run that was started elsewhere.

    watch ── WatchRequest, again every ASK_SECONDS ──► controller
      ▲                                                   │
      └──── ViewReply, once a second, the same for all ◄──┘

A watcher that is killed, stopped or slow does not cost the run anything. It runs on the
controller's machine, with low priority.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import msgspec
from rich.console import Console

from asyncrl.config.run_config import load_config
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.monitoring.terminal.live import LiveView
from asyncrl.monitoring.terminal.run_view import RunView
from asyncrl.runs.directory import is_alive, read_state
from asyncrl.steering.control_socket import ENDINGS, REPLY_SECONDS, open_line
from asyncrl.steering.status_stream import VIEW_SECONDS
from asyncrl.suggestions import resume_command
from asyncrl.wire.errors import NoReply
from asyncrl.wire.messages import control

ASK_SECONDS = control.WATCH_SECONDS / 3
_NICE = 15
_LOOK_SECONDS = 1.0
"""Interval between two checks that the run is active, while no view arrives."""


async def watch(run: Path, console: Console) -> None:
    """Show a run until it ends or the user interrupts. Raises UserError if it is not active."""
    with contextlib.closing(Watching(run)) as watching:
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, os.getpriority(os.PRIO_PROCESS, 0)))
        config = load_config(run / "config.yaml")
        settings = config.monitoring.model_copy(update={"live": "auto"})
        with LiveView(
            settings, config.run.steps, config.run.name, console, refresh_seconds=VIEW_SECONDS
        ) as view:
            while (shown := await watching.view(view.log)) is not None:
                view.update(shown)
            view.log(_how_it_ended(run))


class Watching:
    """A place in the audience of a run. Raises UserError, as `open_line`."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._line = open_line(run)
        self._ask_at = float("-inf")
        self._silent = 0

    async def view(self, log: Callable[[str], None]) -> RunView | None:
        """Wait for the next view; None once the run has ended. Raises AsyncrlError if refused."""
        while True:
            await self._ask()
            with contextlib.suppress(NoReply):
                reply = await self._line.receive_within(_LOOK_SECONDS, what="the run's state")
                self._silent = 0
                if isinstance(reply, control.Refused):
                    raise AsyncrlError(reply.reason)
                if not isinstance(reply, control.ViewReply):
                    raise AsyncrlError(f"the controller answered with {reply}")
                return msgspec.convert(reply.view, RunView)
            if not is_alive(self._run):
                return None
            self._silent += 1
            if self._silent * _LOOK_SECONDS >= REPLY_SECONDS:
                log(f"the controller has not answered for {REPLY_SECONDS:.0f} s; asking again")
                if not self._open_again():
                    return None

    async def _ask(self) -> None:
        now = monotonic()
        if now >= self._ask_at:
            self._ask_at = now + ASK_SECONDS
            await self._line.send(control.WatchRequest())

    def _open_again(self) -> bool:
        self._line.close()
        self._silent, self._ask_at = 0, float("-inf")
        try:
            self._line = open_line(self._run)
        except UserError:
            if not is_alive(self._run):
                return False
            raise
        return True

    def close(self) -> None:
        """Close the connection."""
        self._line.close()


def _how_it_ended(run: Path) -> str:
    state = read_state(run)
    ended = None if state is None else state.ended
    how = f"the run {ENDINGS[ended]}"
    return how if ended == "done" else f"{how}; continue it with: {resume_command(run)}"
