"""One worker process from the pool's side: started, sent calls, read, killed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from asyncrl.errors import RewardError
from asyncrl.rewards import protocol
from asyncrl.rewards.cgroup import ControlGroup
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.endings import how_it_ended, how_it_exited, read_ending
from asyncrl.rewards.protocol import FromWorker
from asyncrl.rewards.streams import MAX_FRAME, pack, take_frame
from asyncrl.rewards.supervisor import KILL_SECONDS
from monitoring.wording import without_controls
from wire.decoding import FrameDecoder, FrameRefused, Reason

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


class WorkerProcess:
    """A worker process, which can be started again after its end.

    Args:
        config: of the rewards.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._setup = protocol.Setup(
            tuple(protocol.Term(f.name, f.weight, f.args) for f in config.functions),
            str(Path.cwd()),
            config.timeout_seconds,
        )
        self._process: asyncio.subprocess.Process | None = None
        self._status = -1
        self._output: asyncio.Task[None] | None = None
        self._buffer = bytearray()
        self.asynchronous = False
        """Whether it runs several calls at once; known once it is started."""

    async def start(self) -> None:
        """Start a new process and load the functions.

        Raises:
            WorkerLost: the process ended meanwhile.
            RewardError: a function cannot be loaded, or not within `startup_seconds`.
        """
        await self.kill()
        await self._spawn()
        ready = False
        try:
            async with asyncio.timeout(self._config.startup_seconds):
                self.send([pack(self._setup)])
                messages: list[FromWorker] = []
                while not messages:
                    messages = await self.receive()
            answer = messages[0]
            if isinstance(answer, protocol.Refused):
                raise RewardError(answer.message)
            if not isinstance(answer, protocol.Ready):
                raise WorkerLost(f"sent {type(answer).__name__} before it was ready")
            self.asynchronous = answer.asynchronous
            ready = True
        except TimeoutError as error:
            raise RewardError(
                f"the rewards ({self._names()}) were not loaded within "
                f"{self._config.startup_seconds:g} s; check what their module does when it is "
                "imported, or raise rewards.startup_seconds"
            ) from error
        except WorkerLost as error:
            raise WorkerLost(
                f"the process that loads the rewards ({self._names()}) {error}"
            ) from error
        finally:
            if not ready:
                await self.kill()

    def send(self, frames: Iterable[bytes]) -> None:
        """Send calls, encoded. If the process has ended, `receive` says so."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(b"".join(frames))

    async def receive(self) -> list[FromWorker]:
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
                log.warning("the supervisor of reward worker %d did not end", process.pid)
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
                sys.executable,
                "-m",
                "asyncrl.rewards.worker",
                str(os.getpid()),
                str(status),
                str(self._config.max_processes),
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
        self._output = asyncio.create_task(_log_output(self._process))

    def _decode(self) -> list[FromWorker]:
        """The whole frames in the buffer. Raises FrameRefused."""
        messages: list[FromWorker] = []
        while (frame := self._next_frame()) is not None:
            messages.append(_DECODER.decode(frame))
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
                f"rewards.max_processes is {self._config.max_processes}",
                too_many=True,
            )
        return WorkerLost(how_it_ended(ending))

    def _names(self) -> str:
        return ", ".join(function.name for function in self._config.functions)


def refused(error: FrameRefused) -> WorkerLost:
    """The error of a process that sent a frame that is not accepted."""
    return WorkerLost(f"wrote a frame that is no answer ({error.reason}: {error}) and was killed")


async def _log_output(process: asyncio.subprocess.Process) -> None:
    """Log what the user's functions print; the supervisor limits how much that is."""
    if process.stderr is None:
        return
    rest = b""
    while chunk := await process.stderr.read(_CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LINE_CHARACTERS:
            lines, rest = [*lines, rest], b""
        _log_lines(process.pid, lines)
    _log_lines(process.pid, [rest])


def _log_lines(pid: int, lines: list[bytes]) -> None:
    for line in lines:
        text = without_controls(line.decode(errors="replace")).rstrip()
        if text:
            cut = text if len(text) <= _LINE_CHARACTERS else f"{text[:_LINE_CHARACTERS]} ..."
            log.info("reward worker %d: %s", pid, cut)
