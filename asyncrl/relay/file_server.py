"""Serves the files of a node's folder of the run to other relays.

serve   consumes: requests of relays that hold a key. produces: one answer to each, in order.
        waits for: a request, then the disk, in a thread. bounded by: PART_BYTES for an answer,
        QUEUED answers for each peer; what a peer does not read beyond that is dropped.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from asyncrl.relay.file_rules import UNFINISHED, PathRefused, files_of, open_below
from asyncrl.wire import Hub
from asyncrl.wire.messages import files
from asyncrl.wire.transport.keys import HubKeys
from asyncrl.wire.transport.refusals import Refusals

QUEUED = 8
_REQUEST_BYTES = 4096


class FileServer:
    """One folder. Make it within the event loop.

    Args:
        root: the folder.
        address: to bind; port `*`: any that is free.
        keys: of the socket.
        may_remove: whether others may have unfinished samples removed that they have copied.
    """

    def __init__(
        self, root: Path, address: str, keys: HubKeys, *, may_remove: bool = False
    ) -> None:
        self._root = root
        self._may_remove = may_remove
        self._hub: Hub[files.ToServer] = Hub(
            address, keys, files.ToServer, Refusals(), max_bytes=_REQUEST_BYTES, queued=QUEUED
        )
        self._disk = ThreadPoolExecutor(1, "file-server")
        self.sent_bytes = 0
        self.fetched: dict[str, int] = {}
        """Files that came from other nodes, by the time of their last change: not listed."""

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._hub.address

    async def serve(self) -> None:
        """Answer until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            peer, request = await self._hub.receive()
            answer: files.FromServer
            if isinstance(request, files.RemoveFile) and not self._may_remove:
                answer = files.NotServed(request.number, f"{request.path} is not removed")
            else:
                answer = await loop.run_in_executor(
                    self._disk, answer_to, self._root, request, dict(self.fetched)
                )
            if isinstance(answer, files.FilePart):
                self.sent_bytes += len(answer.data)
            self._hub.send_soon(peer, answer)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._disk.shutdown(wait=False, cancel_futures=True)
        self._hub.close()


def answer_to(
    root: Path, request: files.ToServer, fetched: Mapping[str, int] | None = None
) -> files.FromServer:
    """The answer to a request; reads the disk. `fetched` as in `FileServer`."""
    others = fetched or {}
    work: Callable[[], files.FromServer]
    match request:
        case files.ListFiles(number=number):
            return files.FileList(
                number,
                tuple(
                    files.FileInfo(path, found.st_size, found.st_mtime_ns)
                    for path, found in files_of(root)
                    if others.get(path) != found.st_mtime_ns
                ),
            )
        case files.ReadFile():
            work = lambda: _part(root, request)  # noqa: E731
        case files.RemoveFile():
            work = lambda: _removed(root, request)  # noqa: E731
    try:
        return work()
    except PathRefused as error:
        return files.NotServed(request.number, str(error))
    except (OSError, OverflowError) as error:  # no file has an offset beyond 2**63
        why = getattr(error, "strerror", None) or error
        return files.NotServed(request.number, f"{request.path}: {why}")


def _part(root: Path, request: files.ReadFile) -> files.FilePart:
    file = open_below(root, request.path)
    try:
        data = os.pread(file, request.size, request.offset)
        found = os.fstat(file)
    finally:
        os.close(file)
    return files.FilePart(request.number, data, found.st_size, found.st_mtime_ns)


def _removed(root: Path, request: files.RemoveFile) -> files.FileRemoved:
    if not request.path.startswith(UNFINISHED):
        raise PathRefused(f"{request.path} is not removed")
    file = open_below(root, request.path)  # so it is a file, behind no link
    try:
        found = os.fstat(file)
    finally:
        os.close(file)
    if (found.st_size, found.st_mtime_ns) != (request.size, request.changed):
        raise PathRefused(f"{request.path} was replaced since it was copied")
    (root / request.path).unlink()
    return files.FileRemoved(request.number)
