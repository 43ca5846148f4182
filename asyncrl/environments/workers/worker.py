"""A worker of environments: `python -m asyncrl.environments.workers.worker PARENT STATUS N`.

The user's environments run here, many in one process, below a supervisor
(`asyncrl.user_code.supervisor`). Async methods run in one event loop; others in a thread that each
session has to itself, so that an environment is always called from the same thread. A method that
takes too long is cancelled, or its thread is left behind and the pool told so: it replaces the
process once several hang. Import-light: no torch, no pydantic.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from asyncrl.environments.registry import Factory, load_factory
from asyncrl.environments.workers.messages import (
    Call,
    Close,
    Failed,
    Hanging,
    Open,
    Ready,
    Restore,
    Setup,
    Step,
    ToWorker,
)
from asyncrl.environments.workers.session_calls import Session
from asyncrl.environments.workers.user_threads import LEFT_BEHIND
from asyncrl.errors import RewardError
from asyncrl.rewards.protocol import Refused
from asyncrl.user_code.error_text import last_lines
from asyncrl.user_code.loading import search
from asyncrl.user_code.streams import Streams
from asyncrl.user_code.supervisor import begin

_LOOK_SECONDS = 1.0
"""Time between two looks at the threads that were left behind."""
_ENDING_SECONDS = 30.0
"""Longest time for an agent's thread to end once its sample has."""


def main() -> None:
    """Serve until standard input ends."""
    streams = begin()
    decoder = msgspec.msgpack.Decoder(ToWorker)

    def read() -> ToWorker | None:
        frame = streams.read()
        return None if frame is None else decoder.decode(frame)

    setup = read()
    if not isinstance(setup, Setup):
        return
    search(setup.search_path)
    try:
        factory = load_factory(setup.name, setup.args)
    except RewardError as error:
        streams.send(Refused(str(error)))
        return
    except (Exception, SystemExit):  # noqa: BLE001 - process edge: reported to the pool
        streams.send(Refused(f"loading the environment {setup.name} failed:\n{last_lines()}"))
        return
    streams.send(Ready(getattr(factory, "notes", [])))
    asyncio.run(_Worker(streams, factory, setup).serve(read))


class _Worker:
    """Serves the sessions of one process."""

    def __init__(self, streams: Streams, factory: Factory, setup: Setup) -> None:
        self._streams = streams
        self._factory = factory
        self._setup = setup
        self._sessions: dict[int, Session] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._hanging = 0
        """As the pool was told."""

    async def serve(self, read: Callable[[], ToWorker | None]) -> None:
        """Answer calls until the stream ends."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[ToWorker | None] = asyncio.Queue()

        def receive() -> None:
            while True:
                message = read()
                loop.call_soon_threadsafe(arrived.put_nowait, message)
                if message is None:
                    return

        threading.Thread(target=receive, name="asyncrl-calls", daemon=True).start()
        self._start(self._watch_threads())
        while (message := await arrived.get()) is not None:
            self._begin(message)
        for session in self._sessions.values():
            self._close(session)
        if self._closing:  # the pool waits for them for some seconds, then kills this process
            await asyncio.wait(self._closing)

    def _begin(self, message: ToWorker) -> None:
        """Which session a message is for is looked up at once: the next one may close it."""
        match message:
            case Open():
                session = self._sessions[message.session] = Session(self._factory, self._setup)
                self._start(self._answer(session, message))
            case Step() | Restore():
                self._start(self._answer(self._sessions[message.session], message))
            case Close() if message.session in self._sessions:  # it may have failed
                self._close(self._sessions.pop(message.session))

    def _close(self, session: Session) -> None:
        task = self._start(session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _answer(self, session: Session, message: Call) -> None:
        """Also if the session was closed meanwhile: a call without an answer counts as hanging."""
        answer = session.sendable(message, await session.answer(message))
        if isinstance(answer, Failed):
            if not answer.continues:
                self._sessions.pop(message.session, None)
                self._close(session)
            self._hanging = self._left_behind()
            answer = msgspec.structs.replace(answer, hanging=self._hanging)
        self._streams.send(answer)

    def _left_behind(self) -> int:
        """Threads that hang. An agent's has some time to end after its sample."""
        return LEFT_BEHIND.count(min(self._setup.step_timeout_seconds, _ENDING_SECONDS))

    async def _watch_threads(self) -> None:
        """Tell the pool how many threads hang when that changes without a call."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if (count := self._left_behind()) != self._hanging:
                self._hanging = count
                self._streams.send(Hanging(count))


if __name__ == "__main__":
    main()
