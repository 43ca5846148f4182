"""A process that runs user code, from the pool's side: started, sent calls, read, killed."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.errors import RewardError
from asyncrl.monitoring.terminal.formatting import without_controls
from asyncrl.user_code.streams import MAX_FRAME, Ready, Refused, take_frame
from asyncrl.user_code.supervisor import KILL_SECONDS, ControlGroup, Ending
from asyncrl.wire.transport.decoding import FrameDecoder, FrameRefused, Reason

log = logging.getLogger(__name__)

_LINE_CHARACTERS = 2000
"""Longest logged line of a worker's output."""
_END_SECONDS = 2 * KILL_SECONDS + 5.0
"""Longest wait for a supervisor that kills its worker."""
_OUTPUT_SECONDS = 1.0
"""Longest wait for the rest of the output of a process that has ended."""
_CHUNK = 1 << 16
_OUTPUT_LINES = 20
"""Last lines of the output that an error message quotes."""


class WorkerLost(RewardError):  # noqa: N818 - says what happened
    """The process has ended, or sent an invalid message."""

    def __init__(self, message: str, *, too_many: bool = False) -> None:
        super().__init__(message)
        self.too_many = too_many
        """True if it was killed because it had started too many processes."""


@dataclass(frozen=True, slots=True)
class Program:
    """The command of a process, and its names in messages."""

    command: tuple[str, ...]
    """An interpreter and a main module, which makes a `user_code.worker.Channel` first."""
    title: str
    """Name of the process in logs, with an article: `a reward worker`."""
    contents: str
    """The code that it loads, and a verb: `the rewards (a, b) were`."""
    setup: bytes
    startup_seconds: float
    max_processes: int
    max_attempts: int
    """Starts before giving up, if it dies while it loads."""


LOOPBACK = ("localhost", "127.0.0.1", "::1")


def environment() -> dict[str, str]:
    """Return this process's environment for one that runs user code.

    Its clients reach this machine without the proxies of `http_proxy` and the like.
    """
    both = ("no_proxy", "NO_PROXY")  # libraries differ in which of them comes first
    named = [one.strip() for name in both for one in os.environ.get(name, "").split(",")]
    direct = "*" if "*" in named else ",".join(dict.fromkeys(filter(None, [*named, *LOOPBACK])))
    return {"OMP_NUM_THREADS": "1", **os.environ, **dict.fromkeys(both, direct)}


class UserProcess:
    """A process below a supervisor, which sends `answers`, and can be started again."""

    def __init__(self, program: Program, answers: Any) -> None:
        self.program = program
        self.loaded = Ready()
        self._decoder = FrameDecoder[Any](Ready | Refused | answers, max_bytes=MAX_FRAME)
        self._process: asyncio.subprocess.Process | None = None
        self._status = -1
        self._output: asyncio.Task[None] | None = None
        self._buffer = bytearray()

    async def start(self) -> None:
        """Start a new process and load the program.

        Raises WorkerLost if the process ended while it loaded, RewardError if something cannot be
        loaded, or not in time.
        """
        await self.kill()
        await self._spawn()
        program, ready = self.program, False
        try:
            async with asyncio.timeout(program.startup_seconds):
                self.send([program.setup])
                messages: list[Any] = []
                while not messages:
                    messages = await self.receive()
            if isinstance(messages[0], Refused):
                raise RewardError(messages[0].message)
            if not isinstance(messages[0], Ready):
                raise WorkerLost(f"sent {type(messages[0]).__name__} before it was ready")
            self.loaded, ready = messages[0], True
        except TimeoutError as error:
            raise RewardError(
                f"{program.contents} not loaded within {program.startup_seconds:g} s; check what "
                "their module does when it is imported, or raise rewards.startup_seconds"
            ) from error
        except WorkerLost as error:
            what = program.contents.rpartition(" ")[0]
            raise WorkerLost(f"the process that loads {what} {error}") from error
        finally:
            if not ready:
                await self.kill()

    def send(self, frames: Iterable[bytes]) -> None:
        """Send encoded calls. If the process has ended, `receive` reports it."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(b"".join(frames))

    async def receive(self) -> list[Any]:
        """Wait for answers; may be cancelled without losing any. Empty if only a part has come.

        Raises WorkerLost if the process has ended or its frames cannot be decoded; the text
        describes the end and follows "the process".
        """
        process = self._process
        if process is None or process.stdout is None:
            raise WorkerLost("was killed")
        data = await process.stdout.read(_CHUNK)
        if not data:
            raise await self._how_it_ended()
        self._buffer += data
        messages: list[Any] = []
        try:
            while (frame := take_frame(self._buffer)) is not None:
                messages.append(self._decoder.decode(frame))
        except FrameRefused as error:
            raise refusal(str(error), error.reason) from error
        except ValueError as error:
            raise refusal(str(error), Reason.TOO_LONG) from error
        return messages

    def terminate(self) -> None:
        """Make the supervisor kill the process and everything it has started. Does not wait."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
                self._process.send_signal(signal.SIGCONT)  # it may be suspended

    async def finish(self, seconds: float) -> None:
        """Close the input and wait for the process to end; kill it after this time."""
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await process.wait()
        await self.kill()

    async def kill(self) -> None:
        """Kill the process and everything it has started. Idempotent, also if it is cancelled."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            self.terminate()
            try:
                async with asyncio.timeout(_END_SECONDS):
                    await process.wait()
            except TimeoutError:
                text = "the supervisor of %s (process %d) did not end and is killed"
                log.warning(text, self.program.title, process.pid)
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
            numbers = map(str, (os.getpid(), status, self.program.max_processes))
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                *self.program.command, *numbers, stdin=pipe, stdout=pipe, stderr=pipe,
                env=environment(), pass_fds=(status,),
                start_new_session=True,  # it gets no Ctrl-C
            )  # fmt: skip
        except OSError as error:  # too many processes or open files
            os.close(self._status)
            raise WorkerLost(f"could not be started: {error}") from error
        finally:
            os.close(status)
        noun = self.program.title.partition(" ")[2]
        self._output = asyncio.create_task(_log_output(self._process, noun))

    async def _how_it_ended(self) -> WorkerLost:
        """Return the error of a process whose output has ended."""
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
            how = how_it_exited(process.returncode or 0)
            return WorkerLost(f"was lost with its supervisor ({how})")
        if ending.too_many:
            return WorkerLost(
                f"was killed because it had started {ending.too_many} processes; "
                f"rewards.max_processes is {self.program.max_processes}",
                too_many=True,
            )
        return WorkerLost(how_it_ended(ending))


def refusal(text: str, reason: Reason = Reason.UNEXPECTED) -> WorkerLost:
    """Return the error of a process that sent a message which no worker sends."""
    return WorkerLost(f"sent a frame that is not a valid answer ({reason}: {text}) and was killed")


async def _log_output(process: asyncio.subprocess.Process, noun: str) -> None:
    """Log the output of the user's functions, whose rate the supervisor limits."""
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
            log.info("%s %d: %s", noun, pid, cut)


def read_ending(status: int) -> Ending | None:
    """Read the supervisor's report from this non-blocking pipe; None if it was lost."""
    try:
        return msgspec.msgpack.decode(os.read(status, _CHUNK), type=Ending)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def how_it_ended(ending: Ending) -> str:
    """Describe the exit, killed processes and the end of the output, to follow "the process"."""
    how = how_it_exited(ending.exit_code)
    if ending.exit_code == -signal.SIGKILL and ending.out_of_memory:
        how += ", by the kernel because the machine's or the container's memory was full"
    if ending.leftover:
        how += f", and {ending.leftover} processes that it had started were killed"
    lines = without_controls(ending.output).strip().splitlines()[-_OUTPUT_LINES:]
    return f"{how}. Its last lines:\n" + "\n".join(lines) if lines else how


def how_it_exited(exit_code: int) -> str:
    """Describe an exit code, negative for a signal."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"was killed by signal {-exit_code}"
