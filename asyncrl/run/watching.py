"""`asyncrl watch`: the live view, attached to a run that was started elsewhere.

    watch ── StatusRequest, once a second ──► controller
      ▲                                          │
      └───── StatusReply, the same for all who ask within a moment ◄──┘

Watchers only ask. One that is killed, stopped or slow costs the run nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from asyncrl.config import load_config
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.run.command_lines import resume_command
from asyncrl.run.control import REPLY_SECONDS, open_line
from asyncrl.run.directory import is_alive, read_state
from monitoring.live import LiveView
from monitoring.run_view import RunView
from wire.errors import NoReply
from wire.messages import control

ASK_SECONDS = 1.0
"""Between two requests."""


async def watch(run: Path, console: Console) -> None:
    """Show a run until it ends, or until the user ends this.

    Raises:
        UserError: the run is not active, or its sockets cannot be trusted.
    """
    with contextlib.closing(_Asking(run)) as asking:
        config = load_config(run / "config.yaml")
        settings = config.monitoring.model_copy(update={"live": "auto"})
        with LiveView(settings, config.run.steps, config.run.name, console) as view:
            while (reply := await asking.status(view.log)) is not None:
                view.update(msgspec.convert(reply.view, RunView))
                await asyncio.sleep(ASK_SECONDS)
            view.log(_how_it_ended(run))


class _Asking:
    """The controller of a run. Raises UserError, as `open_line`."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._line = open_line(run)

    async def status(self, log: Callable[[str], None]) -> control.StatusReply | None:
        """The run's state; None once it has ended. Waits for as long as the controller is silent.

        A connection on which no answer came in time is closed: a late answer must not be taken for
        the one to the next question.
        """
        while (reply := await self._answer()) is None:
            if not is_alive(self._run):
                return None
            log(f"the controller has not answered for {REPLY_SECONDS:.0f} s; asking again")
            self._line.close()
            try:
                self._line = open_line(self._run)
            except UserError:
                if not is_alive(self._run):
                    return None
                raise
        if isinstance(reply, control.StatusReply):
            return reply
        raise AsyncrlError(f"the controller answered a status request with {reply}")

    async def _answer(self) -> control.Reply | None:
        """To one request; None if there is none in time, or the run has ended."""
        await self._line.send(control.StatusRequest())
        for _ in range(int(REPLY_SECONDS)):
            with contextlib.suppress(NoReply):
                return await self._line.receive_within(1.0, what="the controller's answer")
            if not is_alive(self._run):
                return None
        return None

    def close(self) -> None:
        """Close the connection."""
        self._line.close()


def _how_it_ended(run: Path) -> str:
    state = read_state(run)
    ended = None if state is None else state.ended
    if ended == "done":
        return "the run is done"
    how = {"stopped": "was stopped", "failed": "failed", None: "was killed"}[ended]
    return f"the run {how}; continue it with: {resume_command(run)}"
