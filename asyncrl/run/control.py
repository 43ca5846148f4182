"""The line between `asyncrl status|stop|pause|resume` and the controller of a run."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from asyncrl.errors import UserError
from asyncrl.run.directory import is_alive, read_state
from wire import Hub, Line, Unreachable
from wire.addresses import is_private
from wire.messages import control

REPLY_SECONDS = 10.0
"""Longest wait of the command line for the controller."""


async def serve_control(
    hub: Hub[control.Request], answer: Callable[[control.Request], Awaitable[control.Reply]]
) -> None:
    """Answer users one after the other, until cancelled."""
    while True:
        peer, request = await hub.receive()
        reply = await answer(request)
        with contextlib.suppress(Unreachable):  # whoever asked has not waited
            await hub.send(peer, reply)


def ask(run: Path, request: control.Request) -> control.Reply:
    """Send a request to the controller of a run and wait for the reply.

    Raises:
        UserError: the run is not going on.
        NoReply: its controller did not answer.
    """
    state = read_state(run)
    if state is None or not is_alive(run):
        how = "it was killed" if state is None or state.ended is None else f"it {state.ended}"
        raise UserError(
            f"the run in {run} is not going on ({how}); see {run / 'logs'}. Resume it with "
            f"`asyncrl run CONFIG --resume`, or look at it with `asyncrl report {run.name}`"
        )
    folder = Path(state.control_address.removeprefix("ipc://")).parent
    if not folder.is_dir() or not is_private(folder):
        raise UserError(f"the sockets of the run, {folder}, are gone or are not yours alone")
    return asyncio.run(_ask(state.control_address, request))


async def _ask(address: str, request: control.Request) -> control.Reply:
    line: Line[control.Reply] = Line(address, f"user-{os.getpid()}", control.Reply)
    try:
        await line.send(request)
        return await line.receive_within(REPLY_SECONDS, what="the controller's answer")
    finally:
        line.close()
