"""Both ends of the socket for `asyncrl status|watch|stop|pause|resume|...`."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from asyncrl.config.run_config import load_config
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.runs.directory import is_alive, read_state
from asyncrl.steering.status_stream import Audience
from asyncrl.suggestions import command_for, resume_command
from asyncrl.wire import Hub, Line, RunKey, Unreachable
from asyncrl.wire.errors import KeyUnusable, NoReply
from asyncrl.wire.messages import control
from asyncrl.wire.transport.addresses import is_private
from asyncrl.wire.transport.refusals import Refusals

logger = logging.getLogger(__name__)

REPLY_SECONDS = 10.0
_AT_ONCE = 200
_HUB = "user"

Answer = Callable[[str, control.Request], Awaitable[control.Reply | msgspec.Raw]]

ENDINGS = {"done": "is done", "stopped": "was stopped", "failed": "failed", None: "was killed"}


def control_key_file(run: Path) -> Path:
    """Return the file of the key for the run's control socket, made anew at each start."""
    return run / "control.key"


def user_hub(address: str, key: RunKey, refusals: Refusals) -> Hub[control.Request]:
    """Open the socket on which the controller takes the requests of users."""
    return Hub(address, key.hub(_HUB), control.Request, refusals, max_bytes=1 << 16, queued=100)


async def serve_control(
    hub: Hub[control.Request],
    answer: Callable[[control.Request], Awaitable[control.Reply | msgspec.Raw]],
    view: Callable[[], control.ViewReply],
) -> None:
    """Answer requests and show the run to watchers, until cancelled.

    A failed request is refused. A slow one (a checkpoint) does not delay others, up to `_AT_ONCE`.
    """
    audience = Audience(hub, view)

    async def answer_of(peer: str, request: control.Request) -> control.Reply | msgspec.Raw:
        if isinstance(request, control.WatchRequest):
            return audience.join(peer)
        return await answer(request)

    showing = asyncio.create_task(audience.show())
    answering: set[asyncio.Task[None]] = set()
    try:
        while True:
            peer, request = await hub.receive()
            if len(answering) >= _AT_ONCE:
                await asyncio.wait(answering, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.create_task(_answer(hub, peer, request, answer_of))
            answering.add(task)
            task.add_done_callback(answering.discard)
    finally:
        for task in (showing, *answering):
            task.cancel()


async def _answer(
    hub: Hub[control.Request], peer: str, request: control.Request, answer: Answer
) -> None:
    try:
        reply = await answer(peer, request)
    except Exception as error:
        logger.exception("%s of %s failed", type(request).__name__, peer)
        reply = control.Refused(f"the request failed in the controller: {error}")
    with contextlib.suppress(Unreachable):  # the user did not wait
        await hub.send(peer, reply)


def ask(run: Path, request: control.Request) -> control.Reply:
    """Send a request to the controller of a run and wait for the reply.

    Raises UserError if the run is not active or not trusted, NoReply without an answer in time.
    """
    return asyncio.run(send_order(run, request))


def order(run: Path, request: control.Request) -> str:
    """Send an order to a run and return its effect. Raises UserError if it is refused, as `ask`."""
    reply, name = ask(run, request), run.resolve().name
    if isinstance(reply, control.Refused):
        raise UserError(f"{name}: {reply.reason}")
    if not isinstance(reply, control.Accepted):
        raise AsyncrlError(f"{name}: the controller answered an order with {reply}")
    return f"{name}: {reply.message}"


async def send_order(run: Path, request: control.Request) -> control.Reply:
    """Send an order like `ask`, for callers with an event loop."""
    address, key = _door(run)
    try:
        return await send_request(address, key, request, _patience(run, request))
    except NoReply:
        _door(run)  # raises if the run has ended since
        raise


def _patience(run: Path, request: control.Request) -> float:
    """Return the seconds to wait for an answer; `checkpoint` is answered after the write."""
    if not isinstance(request, control.CheckpointRequest):
        return REPLY_SECONDS
    return REPLY_SECONDS + load_config(run / "config.yaml").launcher.checkpoint_seconds


def open_line(run: Path) -> Line[control.Reply]:
    """Connect to the controller of a run, for many requests. Raises UserError, as `ask`."""
    return _line(*_door(run))


def _door(run: Path) -> tuple[str, RunKey]:
    state = read_state(run)
    if state is None or not is_alive(run):
        ended = ENDINGS[None if state is None else state.ended]
        raise UserError(
            f"the run in {run} is not active: it {ended}. Resume it with "
            f"`{resume_command(run)}`, or write its report with `{command_for('report', run)}`; "
            f"its logs are in {run / 'logs'}"
        )
    if not state.control_address:
        raise UserError(
            f"the run in {run} is starting and does not answer yet: its launcher waits for a "
            "cluster or for agents; the output of `asyncrl run` says for which"
        )
    folder = Path(state.control_address.removeprefix("ipc://")).parent
    if not folder.is_dir():
        raise UserError(
            f"cannot talk to the run in {run}: the folder of its sockets, {folder}, was removed. "
            "The run makes it again within seconds, so try again; where it cannot, it ends after a "
            f"checkpoint. `kill -TERM {state.pid}` on its machine does what `asyncrl stop` does"
        )
    if not is_private(folder):
        raise UserError(
            f"cannot talk to the run in {run}: other users can access the folder of its sockets, "
            f"{folder}. `chmod 700 {folder}` makes it private; `kill -TERM {state.pid}` ends the "
            "run in order"
        )
    try:
        key = RunKey.read(control_key_file(run))
    except KeyUnusable as error:
        raise UserError(f"cannot talk to the run in {run}: {error}") from error
    return state.control_address, key


def _line(address: str, key: RunKey) -> Line[control.Reply]:
    name = f"user-{os.getpid()}-{os.urandom(4).hex()}"
    return Line(address, key.line(_HUB, name), control.Reply)


async def send_request(
    address: str, key: RunKey, request: control.Request, seconds: float = REPLY_SECONDS
) -> control.Reply:
    """Send one request and wait for the reply. Raises NoReply."""
    line = _line(address, key)
    try:
        await line.send(request)
        return await line.receive_within(seconds, what="the controller's answer")
    finally:
        line.close()
