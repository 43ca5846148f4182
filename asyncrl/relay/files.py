"""The files part of a relay: serves its node's folder, copies those of others.

mirror  which files, how they change, whose they are; the copies on the disk
pull    copies what other nodes have written, round after round

serve   consumes: requests of relays that hold a key. produces: one answer to each, in order.
        waits for: a request, then the disk, in a thread. bounded by: PART_BYTES for an answer,
        QUEUED answers for each peer; what a peer does not read beyond that is dropped.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msgspec import Struct

from asyncrl.relay import pull
from asyncrl.relay.mirror import UNFINISHED, Mirror, PathRefused, files_of, open_below
from asyncrl.relay.pull import FileClient, FileUnavailable, Pace, Puller
from asyncrl.wire import Hub
from asyncrl.wire.errors import WireError
from asyncrl.wire.messages import files, from_relay, to_relay
from asyncrl.wire.transport.atomic_files import write_atomically
from asyncrl.wire.transport.keys import HubKeys
from asyncrl.wire.transport.refusals import Refusals

QUEUED = 8
_REQUEST_BYTES = 4096


class FileServer:
    """Serves one folder; with `may_remove` others may remove unfinished samples they copied."""

    def __init__(self, root: Path, address: str, keys: HubKeys, may_remove: bool = False) -> None:
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
        """Address that is bound."""
        return self._hub.address

    async def serve(self) -> None:
        """Answer until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            peer, request = await self._hub.receive()
            answer: files.FromServer
            if isinstance(request, files.RemoveFile) and not self._may_remove:
                answer = files.NotServed(request.number, f"this node keeps {request.path}")
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
    """Answer a request; reads the disk. `fetched` as in `FileServer`."""
    others = fetched or {}
    try:
        match request:
            case files.ListFiles(number=number):
                listed = (
                    files.FileInfo(path, found.st_size, found.st_mtime_ns)
                    for path, found in files_of(root)
                    if others.get(path) != found.st_mtime_ns
                )
                return files.FileList(number, tuple(listed))
            case files.ReadFile():
                return _part(root, request)
            case files.RemoveFile():
                return _removed(root, request)
    except PathRefused as error:
        return files.NotServed(request.number, str(error))
    except (OSError, OverflowError) as error:  # no file has an offset beyond 2**63
        why = getattr(error, "strerror", None) or error
        return files.NotServed(request.number, f"{getattr(request, 'path', root)}: {why}")


def _part(root: Path, request: files.ReadFile) -> files.FilePart:
    with os.fdopen(open_below(root, request.path), "rb") as opened:
        data = os.pread(opened.fileno(), request.size, request.offset)
        found = os.fstat(opened.fileno())
    return files.FilePart(request.number, data, found.st_size, found.st_mtime_ns)


def _removed(root: Path, request: files.RemoveFile) -> files.FileRemoved:
    if not request.path.startswith(UNFINISHED):
        raise PathRefused(f"relays do not remove {request.path}")
    with os.fdopen(open_below(root, request.path), "rb") as opened:  # a file, behind no link
        found = os.fstat(opened.fileno())
    if (found.st_size, found.st_mtime_ns) != (request.size, request.changed):
        raise PathRefused(f"{request.path} was replaced since it was copied")
    (root / request.path).unlink()
    return files.FileRemoved(request.number)


logger = logging.getLogger("asyncrl.relay")

FOLDER_FILE = ".folder"
_NAMING_SECONDS = 1.0
"""Time in which another relay that sees the folder has written the id, or was killed."""


class RelayFiles:
    """Serves, copies and fetches files. Create it within the event loop.

    `root` is the run's folder of this node; with `shares` it is the folder that the controller
    sees. The port of `address` may be `*`, any free one. `say` queues a message for the controller.
    """

    def __init__(
        self, root: Path, shares: bool, address: str, keys: HubKeys, say: Callable[[Struct], None]
    ) -> None:
        self._root = root
        self._shares = shares
        self._say = say
        self.server = FileServer(root, address, keys, may_remove=not shares)
        self.puller = Puller(root)
        self._pace = Pace(pull.BYTES_PER_SECOND)
        with contextlib.suppress(OSError):
            Mirror(root, "fetched").remove_remains()
        self._serving = asyncio.create_task(self.server.serve())
        self._tasks: set[asyncio.Task[None]] = set()
        self.ready = from_relay.FilesReady(self.server.address, _id_of(root), shares)

    def check(self) -> None:
        """Raise WireError if the files are not served any more, which is a defect."""
        if self._serving.done():
            raise WireError("the task that serves files has ended")

    def pull(self, order: to_relay.PullFiles) -> None:
        """Copy the files of these nodes into the run's folder."""
        if self._shares:
            self.puller.follow(order.sources)

    def finish(self, order: to_relay.FinishPull) -> None:
        """Copy what is left; answered by `PullFinished`."""

        async def work() -> None:
            self._say(from_relay.PullFinished(await self.puller.finish(order.seconds)))

        self._start(work())

    def fetch(self, order: to_relay.FetchFile) -> None:
        """Bring a file here; answered by `FileHere` or `FileMissing`."""
        self._start(self._fetch(order))

    async def _fetch(self, order: to_relay.FetchFile) -> None:
        reasons = []
        for server in order.servers:
            client = FileClient(server)
            try:
                found = [one for one in await client.list() if one.path == order.path]
                if not found:
                    raise FileUnavailable(f"{server.name} does not have {order.path}")
                if not self._shares:
                    self.server.fetched[order.path] = found[0].changed
                await pull.fetch_whole(client, Mirror(self._root, "fetched"), found[0], self._pace)
            except (FileUnavailable, PathRefused, OSError) as error:
                reasons.append(str(error))
                continue
            finally:
                client.close()
            self._say(from_relay.FileHere(order.attempt, order.path))
            return
        with contextlib.suppress(OSError, PathRefused):
            os.close(open_below(self._root, order.path))  # it was copied here before
            self._say(from_relay.FileHere(order.attempt, order.path))
            return
        self._say(from_relay.FileMissing(order.attempt, order.path, "; ".join(reasons)))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def remove(self) -> None:
        """Remove this node's folder at the end of the run, which has copies of all."""
        if not self._shares:
            shutil.rmtree(self._root, ignore_errors=True)

    def close(self) -> None:
        """End all tasks and close the socket."""
        self.puller.close()
        for task in [self._serving, *self._tasks]:
            task.cancel()
        self.server.close()


def _id_of(root: Path) -> str:
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = root / FOLDER_FILE
    with contextlib.suppress(FileExistsError), path.open("x", encoding="ascii") as file:
        file.write(secrets.token_hex(8))
    until = time.monotonic() + _NAMING_SECONDS
    while not (name := path.read_text(encoding="ascii")):
        if time.monotonic() > until:  # the relay that made the file was killed
            write_atomically(path, secrets.token_hex(8))
        time.sleep(0.01)
    return name
