"""A process that runs a user's code, from the pool's side: started, sent calls, read, killed.

`UserProcess` is shared by the pools of rewards and environments; `WorkerProcess` is a reward
worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from asyncrl.errors import RewardError
from asyncrl.monitoring.terminal.formatting import without_controls
from asyncrl.rewards import protocol
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.protocol import FromWorker
from asyncrl.user_code.exit_status import how_it_ended, how_it_exited, read_ending
from asyncrl.user_code.streams import MAX_FRAME, pack, take_frame
from asyncrl.user_code.supervisor import KILL_SECONDS, ControlGroup
from asyncrl.wire.transport.decoding import FrameDecoder, FrameRefused, Reason

log = logging.getLogger(__name__)

_DECODER: FrameDecoder[FromWorker] = FrameDecoder(FromWorker, max_bytes=MAX_FRAME)
_LINE_CHARACTERS = 2000
"""Longest line of a worker's output that is logged."""
_END_SECONDS = 2 * KILL_SECONDS + 5.0
"""Longest wait for a supervisor that kills its worker."""
_OUTPUT_SECONDS = 1.0
"""Longest wait for the rest of the output of a process that has ended."""
_CHUNK = 1 << 16


class WorkerLost(RewardError):  # noqa: N818 - says what happened
    """The process has ended, or what it sent is no message."""

    def __init__(self, message: str, *, too_many: bool = False) -> None:
        super().__init__(message)
        self.too_many = too_many
        """Whether it was killed because it had started too many processes."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Program:
    """What a process runs, and how messages speak of it."""

    command: tuple[str, ...]
    """An interpreter and a main module, which calls `user_code.worker_start.begin` first."""
    noun: str
    """What it is a worker of, for logs: `reward`."""
    contents: str
    """What it loads: `the rewards (a, b)`."""
    verb: str
    """`was` or `were`, after `contents`."""
    setup: bytes
    """The first frame that it is sent."""
    startup_seconds: float
    max_processes: int


class UserProcess(Generic[T]):
    """A process below a supervisor, which can be started again after its end.

    Args:
        program: what it runs.
        decoder: of what it sends.
    """

    def __init__(self, program: Program, decoder: FrameDecoder[T]) -> None:
        self._program = program
        self._decoder = decoder
        self._process: asyncio.subprocess.Process | None = None
        self._status = -1
        self._output: asyncio.Task[None] | None = None
        self._buffer = bytearray()

    def check_answer(self, answer: T) -> None:
        """Take in the answer to the setup. Raises RewardError if it is a refusal.

        Raises:
            WorkerLost: it is no answer to the setup.
        """
        raise NotImplementedError

    async def start(self) -> None:
        """Start a new process and load what it runs.

        Raises:
            WorkerLost: the process ended meanwhile.
            RewardError: something cannot be loaded, or not within the startup's time.
        """
        await self.kill()
        await self._spawn()
        program, ready = self._program, False
        try:
            async with asyncio.timeout(program.startup_seconds):
                self.send([program.setup])
                messages: list[T] = []
                while not messages:
                    messages = await self.receive()
            self.check_answer(messages[0])
            ready = True
        except TimeoutError as error:
            raise RewardError(
                f"{program.contents} {program.verb} not loaded within "
                f"{program.startup_seconds:g} s; check what their module does when it is "
                "imported, or raise rewards.startup_seconds"
            ) from error
        except WorkerLost as error:
            raise WorkerLost(f"the process that loads {program.contents} {error}") from error
        finally:
            if not ready:
                await self.kill()

    def send(self, frames: Iterable[bytes]) -> None:
        """Send calls, encoded. If the process has ended, `receive` says so."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(b"".join(frames))

    async def receive(self) -> list[T]:
        """Wait for answers; may be cancelled without losing any. Empty if only a part has come.

        Raises:
            WorkerLost: the process has ended, or its frames cannot be decoded; the text says how
                it ended and follows "the process".
        """
        process = self._process
        if process is None or process.stdout is None:
            raise WorkerLost("was killed")
        data = await process.stdout.read(_CHUNK)
        if not data:
            raise await self._how_it_ended()
        self._buffer += data
        try:
            return self._decode()
        except FrameRefused as error:
            raise refused(error) from error

    def terminate(self) -> None:
        """Have the supervisor kill the process and everything it has started. Does not wait."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
                self._process.send_signal(signal.SIGCONT)  # it may be suspended

    async def finish(self, seconds: float) -> None:
        """Close its input and let it end by itself; after so many seconds it is killed."""
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await process.wait()
        await self.kill()

    async def kill(self) -> None:
        """End the process and everything it has started. Idempotent, also if it is cancelled."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            self.terminate()
            try:
                async with asyncio.timeout(_END_SECONDS):
                    await process.wait()
            except TimeoutError:
                log.warning(
                    "the supervisor of %s worker %d did not end", self._program.noun, process.pid
                )
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode != 0:  # the supervisor itself was killed
            group = ControlGroup.of(process.pid)
            if group is not None:
                await asyncio.to_thread(group.kill, KILL_SECONDS)
        self._process = None
        if process.stdin is not None:
            process.stdin.close()
        os.close(self._status)
        self._buffer.clear()
        output, self._output = self._output, None
        if output is not None:  # every writer has ended
            await asyncio.wait([output], timeout=_OUTPUT_SECONDS)
            output.cancel()
            await asyncio.wait([output])

    async def _spawn(self) -> None:
        """Start the supervisor, which forks the worker. Raises WorkerLost."""
        self._status, status = os.pipe()
        os.set_blocking(self._status, False)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._program.command,
                str(os.getpid()),
                str(status),
                str(self._program.max_processes),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                pass_fds=(status,),
                start_new_session=True,  # it gets no Ctrl-C
            )
        except OSError as error:  # too many processes or open files
            os.close(self._status)
            raise WorkerLost(f"could not be started: {error}") from error
        finally:
            os.close(status)
        self._output = asyncio.create_task(_log_output(self._process, self._program.noun))

    def _decode(self) -> list[T]:
        """The whole frames in the buffer. Raises FrameRefused."""
        messages: list[T] = []
        while (frame := self._next_frame()) is not None:
            messages.append(self._decoder.decode(frame))
        return messages

    def _next_frame(self) -> bytes | None:
        try:
            return take_frame(self._buffer)
        except ValueError as error:
            raise FrameRefused(Reason.TOO_LONG, str(error)) from error

    async def _how_it_ended(self) -> WorkerLost:
        """The error of a process whose output has ended; the text follows "the process"."""
        process = self._process
        if process is None:
            return WorkerLost("was killed")
        try:
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
        except TimeoutError:
            return WorkerLost("closed its output but did not end")
        ending = read_ending(self._status)
        if ending is None:
            return WorkerLost(
                f"was lost with its supervisor ({how_it_exited(process.returncode or 0)})"
            )
        if ending.too_many:
            return WorkerLost(
                f"was killed because it had started {ending.too_many} processes; "
                f"rewards.max_processes is {self._program.max_processes}",
                too_many=True,
            )
        return WorkerLost(how_it_ended(ending))


class WorkerProcess(UserProcess[FromWorker]):
    """A reward worker.

    Args:
        config: of the rewards.
    """

    def __init__(self, config: RewardConfig) -> None:
        setup = protocol.Setup(
            tuple(protocol.Term(f.name, f.weight, f.args) for f in config.functions),
            str(Path.cwd()),
            config.timeout_seconds,
        )
        names = ", ".join(function.name for function in config.functions)
        super().__init__(
            Program(
                (sys.executable, "-P", "-m", "asyncrl.rewards.worker"),
                "reward",
                f"the rewards ({names})",
                "were",
                pack(setup),
                config.startup_seconds,
                config.max_processes,
            ),
            _DECODER,
        )
        self.asynchronous = False
        """Whether it runs several calls at once; known once it is started."""

    def check_answer(self, answer: FromWorker) -> None:
        """See the base class."""
        if isinstance(answer, protocol.Refused):
            raise RewardError(answer.message)
        if not isinstance(answer, protocol.Ready):
            raise WorkerLost(f"sent {type(answer).__name__} before it was ready")
        self.asynchronous = answer.asynchronous


def refused(error: FrameRefused) -> WorkerLost:
    """The error of a process that sent a frame that is not accepted."""
    return WorkerLost(f"wrote a frame that is no answer ({error.reason}: {error}) and was killed")


async def _log_output(process: asyncio.subprocess.Process, noun: str) -> None:
    """Log what the user's functions print; the supervisor limits how much that is."""
    if process.stderr is None:
        return
    rest = b""
    while chunk := await process.stderr.read(_CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LINE_CHARACTERS:
            lines, rest = [*lines, rest], b""
        _log_lines(noun, process.pid, lines)
    _log_lines(noun, process.pid, [rest])


def _log_lines(noun: str, pid: int, lines: list[bytes]) -> None:
    for line in lines:
        text = without_controls(line.decode(errors="replace")).rstrip()
        if text:
            cut = text if len(text) <= _LINE_CHARACTERS else f"{text[:_LINE_CHARACTERS]} ..."
            log.info("%s worker %d: %s", noun, pid, cut)
