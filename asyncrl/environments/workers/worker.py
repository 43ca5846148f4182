"""A worker of environments: `python -m asyncrl.environments.workers.worker PARENT STATUS N`.

The user's environments run here, many in one process, below a supervisor
(`asyncrl.user_code.supervisor`). Async methods run in one event loop, others in one thread per
session, so that an environment is always called from the same thread. An async method that takes
too long is cancelled; a thread is left behind and reported to the pool, which replaces the process
once several hang. Import-light: no torch, no pydantic.
"""

import asyncio
import contextlib
import hashlib
import inspect
import pickle
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgspec

from asyncrl.environments import protocol
from asyncrl.environments.protocol import BadAnswerError, FailureReason, Traits
from asyncrl.environments.registry import Factory, load_factory
from asyncrl.environments.workers import messages
from asyncrl.environments.workers.messages import Answer, Call, Failed, Open, Restore, Setup, Step
from asyncrl.environments.workers.user_threads import LEFT_BEHIND, SessionThread
from asyncrl.rewards.values import argument_for, is_unavailable
from asyncrl.user_code.streams import MAX_FRAME, Ready, bounded, last_lines, pack
from asyncrl.user_code.worker import Channel

_MOST_BYTES = 1 << 20
"""Largest state that is compared: a larger one would cost milliseconds per turn."""


class Snapshots:
    """The states before each turn of a session.

    A state that shares parts with the environment changes with the next `step`, and its restoration
    would silently give the answers of a game that was never played. So a hash of each is compared.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Any, bytes | None]] = []

    def __len__(self) -> int:
        """Return the number of turns that have begun."""
        return len(self._kept)

    def add(self, state: Any) -> None:
        """Keep the state before the next turn."""
        self._kept.append((state, _mark(state)))

    def take(self, turn: int) -> Any:
        """Return the state before this turn (from 0) and forget it and later ones.

        Raises BadAnswerError if it has changed since.
        """
        state, mark = self._kept[turn]
        del self._kept[turn:]
        if mark is not None and _mark(state) != mark:
            raise BadAnswerError(
                "wrong_type",
                f"the state that `snapshot` returned before turn {turn} has changed: it shares "
                "parts with the environment. Return a deep copy (copy.deepcopy)",
            )
        return state


def _mark(state: Any) -> bytes | None:
    """Return a digest of a state; None if it cannot be pickled, or is large."""
    text = _Hashed()
    try:
        pickle.Pickler(text, protocol=5).dump(state)
    except Exception:  # noqa: BLE001 - of the user's objects
        return None
    return text.hash.digest()


class _Hashed:
    """A file that hashes the bytes written to it."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self._left = _MOST_BYTES

    def write(self, data: Any) -> int:
        """Add bytes to the hash. Raises ValueError if there are too many."""
        size = memoryview(data).nbytes
        self._left -= size
        if self._left < 0:
            raise ValueError("the state is too large to be compared")
        self.hash.update(data)
        return size


_CLOSE_SECONDS = 5.0
"""Longest time for an environment's `close`."""


class Session:
    """One environment, from `reset` to `close`. Its calls come one after the other."""

    def __init__(self, factory: Factory, setup: Setup) -> None:
        self._factory = factory
        self._setup = setup
        self._environment: Any = None
        self._traits = Traits()
        self._snapshots = Snapshots()
        self._thread: SessionThread | None = None
        self._calls = asyncio.Lock()
        self._answering: asyncio.Task[Any] | None = None
        self._in_thread = False
        """A call is in the thread, or has just ended."""
        self._hangs = False
        self._closed = False

    async def answer(self, message: Call) -> Answer:
        """Make a call; a failure of the user's code becomes an answer too."""
        call = message.call
        seconds = self._setup.step_timeout_seconds
        if isinstance(message, Open):
            seconds = self._setup.reset_timeout_seconds
        limit = asyncio.timeout(seconds)
        try:
            async with self._calls, limit:
                self._answering = asyncio.current_task()
                if isinstance(message, Open):
                    return await self._open(message)
                if isinstance(message, Step):
                    return await self._step(message)
                return await self._restore(message)
        except BadAnswerError as error:
            return Failed(call, error.reason, bounded(str(error)), self._continues(message))
        except TimeoutError:
            if limit.expired():
                if self._thread is not None and self._thread.busy:
                    self._hangs = True
                    self._thread.end()
                return Failed(call, "timeout", "", self._continues(message))
            return Failed(call, "raised", last_lines(), self._continues(message))
        except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:  # noqa: BLE001
            reason: FailureReason = "unavailable" if is_unavailable(error) else "raised"
            return Failed(call, reason, last_lines(), self._continues(message))
        finally:
            self._answering = None

    def sendable(self, message: Call, answer: Answer) -> Answer:
        """Return the answer to a call, or a failure if the user's values cannot be sent."""
        try:
            size = len(pack(answer))
        except Exception as error:  # noqa: BLE001 - of the user's values
            text = bounded(f"its answer cannot be sent: {error}")
            return Failed(answer.call, "wrong_type", text, self._continues(message))
        if size > MAX_FRAME:
            text = f"its answer has {size} bytes, more than {MAX_FRAME}"
            return Failed(answer.call, "too_long", text, self._continues(message))
        return answer

    def _continues(self, message: Call) -> bool:
        """Return True if the session can go back to before a failed call."""
        return isinstance(message, Step) and self._traits.restores and not self._hangs

    async def close(self) -> None:
        """Call the environment's `close`, if it has one, and end its thread. Idempotent.

        A call in progress is cancelled if it is async, and otherwise ends first, within its time.
        """
        if self._closed:
            return
        self._closed = True
        if self._answering is not None and not self._in_thread:
            self._answering.cancel()
        async with self._calls:
            if self._hangs:
                return
            with contextlib.suppress(Exception, SystemExit, KeyboardInterrupt, TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    close = getattr(self._environment, "close", None)
                    if callable(close):
                        await self._run(close)
        if self._thread is not None:
            self._thread.end()

    async def _open(self, message: Open) -> Answer:
        environment = self._environment = await self._next(self._factory)
        protocol.check_methods(environment)
        row = argument_for(message.row, row_only=False)
        first = protocol.checked_reset(await self._next(environment.reset, row, message.seed))
        traits = self._traits = protocol.traits_of(environment)
        limit = protocol.max_turn_tokens_of(environment, traits)
        return messages.Opened(message.call, first, traits, limit)

    async def _step(self, message: Step) -> Answer:
        if self._traits.restores:
            await self._next(self._snapshots.add, await self._next(self._environment.snapshot))
        step = protocol.checked_step(await self._next(self._environment.step, message.action))
        limit = protocol.max_turn_tokens_of(self._environment, self._traits)
        return messages.Stepped(message.call, replace(step, info={}), limit)

    async def _restore(self, message: Restore) -> Answer:
        if message.turn < len(self._snapshots):
            state = await self._next(self._snapshots.take, message.turn)
            await self._next(self._environment.restore, state)
        return messages.Restored(message.call)

    async def _next(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call `_run`, unless the session was closed."""
        if self._closed:
            raise asyncio.CancelledError
        return await self._run(method, *args)

    async def _run(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a user's method in the event loop if it is async, else in the thread."""
        if inspect.iscoroutinefunction(method):
            return await method(*args)
        if self._thread is None:
            self._thread = SessionThread()
        self._in_thread = True
        try:
            result = await self._thread.run(method, args)
        finally:
            self._in_thread = False
        return await result if inspect.isawaitable(result) else result


_LOOK_SECONDS = 1.0
"""Time between two counts of hanging threads."""
_ENDING_SECONDS = 30.0
"""Longest time for an agent's thread to end after its sample."""


def main() -> None:
    """Serve until standard input ends."""
    channel = Channel(messages.ToWorker)
    setup = channel.read()
    if not isinstance(setup, Setup):
        return
    name, args = setup.name, setup.args
    what = f"the environment {name}"
    factory = channel.load(setup.search_path, what, lambda: load_factory(name, args))
    if factory is not None:
        channel.send(Ready(notes=getattr(factory, "notes", [])))
        asyncio.run(_Worker(channel, factory, setup).serve())


class _Worker:
    """Serves the sessions of one process."""

    def __init__(self, channel: Channel, factory: Factory, setup: Setup) -> None:
        self._channel = channel
        self._factory = factory
        self._setup = setup
        self._sessions: dict[int, Session] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._hanging = 0
        """The number that the pool knows."""

    async def serve(self) -> None:
        """Answer calls until the stream ends."""
        self._start(self._watch_threads())
        async for message in self._channel.messages():
            self._begin(message)
        for session in self._sessions.values():
            self._close(session)
        if self._closing:  # the pool waits for them for some seconds, then kills this process
            await asyncio.wait(self._closing)

    def _begin(self, message: messages.ToWorker) -> None:
        """Look up the session of a message at once, since the next message may close it."""
        match message:
            case Open():
                session = self._sessions[message.session] = Session(self._factory, self._setup)
                self._start(self._answer(session, message))
            case Step() | Restore() if message.session in self._sessions:
                self._start(self._answer(self._sessions[message.session], message))
            case Step() | Restore():  # sent before the pool knew that the session had failed
                text = "its session has failed in an earlier call"
                self._channel.send(Failed(message.call, "raised", text, hanging=self._hanging))
            case messages.Close() if message.session in self._sessions:  # it may have failed
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
        """Answer even if the session was closed: a call without an answer counts as hanging."""
        answer = session.sendable(message, await session.answer(message))
        if isinstance(answer, Failed):
            if not answer.continues:
                self._sessions.pop(message.session, None)
                self._close(session)
            self._hanging = self._left_behind()
            answer = msgspec.structs.replace(answer, hanging=self._hanging)
        self._channel.send(answer)

    def _left_behind(self) -> int:
        """Count hanging threads; an agent's may take some time to end after its sample."""
        return LEFT_BEHIND.count(min(self._setup.step_timeout_seconds, _ENDING_SECONDS))

    async def _watch_threads(self) -> None:
        """Report a change of the number of hanging threads to the pool."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if (count := self._left_behind()) != self._hanging:
                self._hanging = count
                self._channel.send(messages.Hanging(count))


if __name__ == "__main__":
    main()
