"""Asks another relay for files: one request at a time, each with a limit."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from asyncrl.wire import Line, NoReply, Unreachable, WireError
from asyncrl.wire.messages import files

ANSWER_SECONDS = 10.0
"""Longest wait for an answer. A part of a file is at most a MiB."""

T = TypeVar("T")


class FileUnavailable(WireError):  # noqa: N818 - says what is the case
    """The other relay does not serve the file, or does not answer; the text says which."""


class FileClient:
    """A connection to one relay's files. Make it within the event loop.

    Args:
        server: where the other relay serves its folder.
    """

    def __init__(self, server: files.Server) -> None:
        self.server = server
        self._line: Line[files.FromServer] = Line(server.address, server.keys, files.FromServer)
        self._number = 0
        self._one_at_a_time = asyncio.Lock()

    async def list(self) -> tuple[files.FileInfo, ...]:
        """The files that it serves. Raises FileUnavailable."""
        return (await self._ask(files.ListFiles(self._next()), files.FileList)).files

    async def read(self, path: str, offset: int, size: int = files.PART_BYTES) -> files.FilePart:
        """A part of a file. Raises FileUnavailable."""
        return await self._ask(files.ReadFile(self._next(), path, offset, size), files.FilePart)

    async def remove(self, file: files.FileInfo) -> None:
        """Have a file that was copied removed there. Raises FileUnavailable."""
        request = files.RemoveFile(self._next(), file.path, file.size, file.changed)
        await self._ask(request, files.FileRemoved)

    def _next(self) -> int:
        self._number += 1
        return self._number

    async def _ask(self, request: files.ToServer, kind: type[T]) -> T:
        name = self.server.name
        async with self._one_at_a_time:
            try:
                await self._line.send(request)
                answer = await self._answer(request.number)
            except (TimeoutError, NoReply, Unreachable) as error:
                raise FileUnavailable(
                    f"{name} has not answered {type(request).__name__} for {ANSWER_SECONDS:.0f} s"
                ) from error
        if isinstance(answer, files.NotServed):
            raise FileUnavailable(f"{name}: {answer.reason}")
        if not isinstance(answer, kind):
            raise FileUnavailable(f"{name} answered {type(request).__name__} with something else")
        return answer

    async def _answer(self, number: int) -> files.FromServer:
        async with asyncio.timeout(ANSWER_SECONDS):
            while True:  # answers to requests that were given up may come late
                answer = await self._line.receive()
                if answer.number == number:
                    return answer

    def close(self) -> None:
        """Close the connection."""
        self._line.close()
