"""`asyncrl watch`: the live view, attached to a run that was started elsewhere.

    watch ── StatusRequest, once a second ──► controller
      ▲                                          │
      └───── StatusReply, the same for all who ask within a moment ◄──┘

Watchers only ask. One that is killed, stopped or slow costs the run nothing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from rich.console import Console

from asyncrl.config import load_config
from asyncrl.errors import AsyncrlError
from asyncrl.run.command_lines import resume_command
from asyncrl.run.control import REPLY_SECONDS, open_line
from asyncrl.run.directory import is_alive, read_state
from monitoring.live import LiveView
from monitoring.run_view import RunView
from wire import Line
from wire.errors import NoReply
from wire.messages import control

ASK_SECONDS = 1.0
"""Between two requests."""


async def watch(run: Path, console: Console) -> None:
    """Show a run until it ends, or until the user ends this.

    Raises:
        UserError: the run is not active, or its sockets cannot be trusted.
    """
    line = open_line(run)
    config = load_config(run / "config.yaml")
    settings = config.monitoring.model_copy(update={"live": "auto"})
    try:
        with LiveView(settings, config.run.steps, config.run.name, console) as view:
            while (reply := await _ask(line, run, view)) is not None:
                view.update(msgspec.convert(reply.view, RunView))
                await asyncio.sleep(ASK_SECONDS)
            view.log(_how_it_ended(run))
    finally:
        line.close()


async def _ask(line: Line[control.Reply], run: Path, view: LiveView) -> control.StatusReply | None:
    """The run's state; None once it has ended."""
    await line.send(control.StatusRequest())
    for _ in range(int(REPLY_SECONDS)):
        try:
            reply = await line.receive_within(1.0, what="the controller's answer")
        except NoReply:
            if not is_alive(run):
                return None
            continue
        if isinstance(reply, control.StatusReply):
            return reply
        raise AsyncrlError(f"the controller answered a status request with {reply}")
    view.log(f"the controller has not answered for {REPLY_SECONDS:.0f} s; asking again")
    return await _ask(line, run, view)


def _how_it_ended(run: Path) -> str:
    state = read_state(run)
    ended = None if state is None else state.ended
    if ended == "done":
        return "the run is done"
    how = {"stopped": "was stopped", "failed": "failed", None: "was killed"}[ended]
    return f"the run {how}; continue it with: {resume_command(run)}"
