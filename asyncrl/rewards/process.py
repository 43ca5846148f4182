"""One worker process from the pool's side: started when needed, given calls, killed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from asyncrl.errors import RewardError, RewardFailed, RewardTimeout
from asyncrl.rewards import protocol
from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.protocol import Call, FromWorker, Raised, Scored
from wire.decoding import FrameDecoder, FrameRefused, Reason

log = logging.getLogger(__name__)

_DECODER: FrameDecoder[FromWorker] = FrameDecoder(FromWorker, max_bytes=protocol.MAX_FRAME)
_STDERR_LINES = 20
"""Last lines of a worker's standard error that an error message quotes."""
_END_SECONDS = 5.0
"""Longest wait for a process whose output has ended."""


class WorkerProcess:
    """A slot of the pool. If its process has ended, the next call starts another."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._terms = tuple(protocol.Term(f.name, f.weight, f.args) for f in config.functions)
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        self._stderr_reader: asyncio.Task[None] | None = None
        self._term = 0

    async def start(self) -> None:
        """Start the process and load the functions. Does nothing while the process runs.

        Raises:
            RewardError: a function cannot be loaded, or not within `startup_seconds`.
        """
        if self._process is not None and self._process.returncode is None:
            return
        await self.kill()
        self._process = await _spawn()
        self._stderr_reader = asyncio.create_task(self._keep_stderr(self._process))
        ready = False
        try:
            async with asyncio.timeout(self._config.startup_seconds):
                await self._send(protocol.Setup(self._terms, str(Path.cwd())))
                answer = await self._receive()
            if isinstance(answer, protocol.Refused):
                raise RewardError(answer.message)
            ready = isinstance(answer, protocol.Ready)
        except TimeoutError as error:
            raise RewardError(
                f"the rewards ({self._names()}) were not loaded within "
                f"{self._config.startup_seconds:g} s; check what their module does when it is "
                "imported, or raise rewards.startup_seconds"
            ) from error
        except FrameRefused as error:
            raise RewardError(
                f"the rewards ({self._names()}) were not loaded: their process {_refused(error)}"
            ) from error
        except (EOFError, ConnectionError) as error:
            raise RewardError(
                f"the process that loads the rewards ({self._names()}) {await self._ending()}"
            ) from error
        finally:
            if not ready:
                await self.kill()

    async def score(self, calls: Sequence[Call]) -> AsyncGenerator[Scored | RewardFailed, None]:
        """Score responses. They are sent all at once and answered in turn.

        After an exception the process is gone, and the calls behind the one that failed were not
        begun.

        Yields:
            The answer to each call: RewardFailed if a function raised or returned no finite number.

        Raises:
            RewardTimeout: the call in turn was not answered within `timeout_seconds`.
            RewardFailed: a function ended its process.
        """
        await self.start()
        answered = 0
        try:
            await self._send(*calls)
            for call in calls:
                self._term = 0
                async with asyncio.timeout(self._config.timeout_seconds):
                    answer = await self._answer()
                answered += 1
                if isinstance(answer, Raised):
                    self._term = answer.term
                    yield RewardFailed(
                        f"reward {self._culprit()!r} failed for the response "
                        f"{_shortened(call.response)}:\n{answer.message}"
                    )
                else:
                    yield answer
        except TimeoutError as error:
            raise RewardTimeout(
                f"reward {self._culprit()!r} did not return within "
                f"{self._config.timeout_seconds:g} s (rewards.timeout_seconds) for the response "
                f"{_shortened(calls[answered].response)}; its process was killed"
            ) from error
        except FrameRefused as error:
            raise RewardFailed(
                f"reward {self._culprit()!r}: its process {_refused(error)}"
            ) from error
        except (EOFError, ConnectionError) as error:
            raise RewardFailed(
                f"reward {self._culprit()!r}: its process {await self._ending()}; it was scoring "
                f"the response {_shortened(calls[answered].response)}"
            ) from error
        finally:
            # Also when cancelled: a late answer would be taken for the next call's.
            if answered < len(calls):
                await self.kill()

    async def kill(self) -> None:
        """End the process and everything it has started. Idempotent."""
        process, self._process = self._process, None
        reader, self._stderr_reader = self._stderr_reader, None
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()
        if reader is not None:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _answer(self) -> Scored | Raised:
        while True:
            answer = await self._receive()
            self._check(answer)
            if isinstance(answer, protocol.Began):
                self._term = answer.term
            elif isinstance(answer, Scored | Raised):
                return answer
            else:
                raise EOFError(f"the worker sent {type(answer).__name__} in answer to a call")

    def _check(self, answer: FromWorker) -> None:
        """Refuse numbers that no worker sends; the user's code can write to its process's files."""
        if isinstance(answer, protocol.Began | Raised) and not 0 <= answer.term < len(self._terms):
            raise FrameRefused(Reason.UNEXPECTED, f"there is no function {answer.term}")
        if isinstance(answer, Scored) and not math.isfinite(answer.value):
            raise FrameRefused(Reason.UNEXPECTED, f"a reward of {answer.value}")

    async def _send(self, *messages: protocol.ToWorker) -> None:
        assert self._process is not None and self._process.stdin is not None  # noqa: S101, PT018
        self._process.stdin.write(b"".join(protocol.pack(message) for message in messages))
        await self._process.stdin.drain()

    async def _receive(self) -> FromWorker:
        assert self._process is not None and self._process.stdout is not None  # noqa: S101, PT018
        stdout = self._process.stdout
        length = protocol.body_length(await stdout.readexactly(protocol.HEAD_BYTES))
        return _DECODER.decode(await stdout.readexactly(length))

    async def _keep_stderr(self, process: asyncio.subprocess.Process) -> None:
        """Log what the user's functions print; keep the last lines for error messages."""
        assert process.stderr is not None  # noqa: S101
        while chunk := await process.stderr.read(4096):
            for line in chunk.decode(errors="replace").splitlines():
                self._stderr.append(line)
                log.info("reward worker %d: %s", process.pid, line)

    async def _ending(self) -> str:
        """How the process ended, for an error message."""
        process = self._process
        if process is None:
            return "ended"
        try:
            async with asyncio.timeout(_END_SECONDS):
                code = await process.wait()
                if self._stderr_reader is not None:
                    await asyncio.wait([self._stderr_reader])
        except TimeoutError:
            return "closed its output but did not end"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"{how}. Its last lines:\n" + "\n".join(self._stderr) if self._stderr else how

    def _names(self) -> str:
        return ", ".join(term.name for term in self._terms)

    def _culprit(self) -> str:
        return self._terms[self._term].name


async def _spawn() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "asyncrl.rewards.worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        # In a session of its own it gets no Ctrl-C, and killing the session also ends whatever
        # the user's function has started.
        start_new_session=True,
    )


def _refused(error: FrameRefused) -> str:
    return f"wrote a frame that is no answer ({error.reason}: {error}) and was killed"


def _shortened(text: str, limit: int = 80) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")
