"""Copies the files of other nodes into the run's folder while the run lasts.

one task for each node   consumes: what its relay lists. produces: copies (`mirror`).
                         waits for: PULL_SECONDS, the other relay, the disk (in threads).
                         bounded by: one part of a file in memory for each node, BYTES_PER_SECOND
                         for all of them together, ANSWER_SECONDS for an answer.

A node that does not answer, and a disk that refuses, delay that node's copies only: the next round
continues where the last one ended, even in another relay process.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from pathlib import Path
from typing import TypeVar

from asyncrl.relay.mirror import UNFINISHED, Kind, Mirror, PathRefused, rule_of
from asyncrl.wire import Line, NoReply, Unreachable, WireError
from asyncrl.wire.messages import files
from asyncrl.wire.messages.to_relay import FileSource

ANSWER_SECONDS = 10.0
"""Longest wait for an answer. A part of a file is at most a MiB."""

T = TypeVar("T")


class FileUnavailable(WireError):  # noqa: N818 - names the state
    """The other relay does not serve the file; the text says why."""


class RelaySilent(FileUnavailable):
    """The other relay does not answer."""


class FileClient:
    """A connection to one relay's files, one request at a time. Create it within the event loop."""

    def __init__(self, server: files.Server) -> None:
        self.server = server
        self._line: Line[files.FromServer] = Line(server.address, server.keys, files.FromServer)
        self._numbers = itertools.count(1)
        self._one_at_a_time = asyncio.Lock()

    async def list(self) -> tuple[files.FileInfo, ...]:
        """List the served files. Raises FileUnavailable."""
        return (await self._ask(files.ListFiles(next(self._numbers)), files.FileList)).files

    async def read(self, path: str, offset: int, size: int = files.PART_BYTES) -> files.FilePart:
        """Read a part of a file. Raises FileUnavailable."""
        return await self._ask(
            files.ReadFile(next(self._numbers), path, offset, size), files.FilePart
        )

    async def remove(self, file: files.FileInfo) -> None:
        """Remove a copied file at its source. Raises FileUnavailable."""
        request = files.RemoveFile(next(self._numbers), file.path, file.size, file.changed)
        await self._ask(request, files.FileRemoved)

    async def _ask(self, request: files.ToServer, kind: type[T]) -> T:
        name = self.server.name
        async with self._one_at_a_time:
            try:
                await self._line.send(request)
                answer = await self._answer(request.number)
            except (TimeoutError, NoReply, Unreachable) as error:
                raise RelaySilent(
                    f"{name} has not answered {type(request).__name__} for {ANSWER_SECONDS:.0f} s"
                ) from error
        if isinstance(answer, files.NotServed):
            raise FileUnavailable(f"{name}: {answer.reason}")
        if not isinstance(answer, kind):
            raise FileUnavailable(
                f"{name} answered {type(request).__name__} with {type(answer).__name__}"
            )
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


logger = logging.getLogger("asyncrl.relay")

PULL_SECONDS = 1.0
RETRY_SECONDS = 5.0
_BREATH_SECONDS = 0.2
"""Pause at the end of a run, which waits for the last round."""
BYTES_PER_SECOND = 100e6
_ORDER = {Kind.GROWS: 0, Kind.SAMPLES: 1, Kind.WHOLE: 2}


class Pace:
    """Limits the total bytes per second of all callers."""

    def __init__(self, bytes_per_second: float) -> None:
        self._seconds_per_byte = 1.0 / bytes_per_second
        self._free_at = 0.0

    async def take(self, size: int) -> None:
        """Wait until this many more bytes may pass."""
        now = time.monotonic()
        wait = self._free_at - now
        self._free_at = max(self._free_at, now) + size * self._seconds_per_byte
        if wait > 0:
            await asyncio.sleep(wait)


class Copying:
    """Copies the files of one node, at the common pace of all nodes."""

    def __init__(self, root: Path, source: FileSource, pace: Pace) -> None:
        self.source = source
        self._client = FileClient(source.server)
        self._mirror = Mirror(root, source.folder)
        self._pace = pace
        self._refused: set[str] = set()

    async def round(self) -> int:
        """Copy everything that is new; return the bytes copied.

        Raises FileUnavailable if the relay does not answer, or a file was not served; OSError if a
        copy cannot be written. Other files were tried all the same.
        """
        found = [file for file in await self._client.list() if self._is_theirs(file.path)]
        found.sort(key=lambda file: _ORDER[rule_of(file.path)[0]])
        copied = 0
        failure: Exception | None = None
        for file in found:
            try:
                is_whole = rule_of(file.path)[0] is Kind.WHOLE
                copied += await (self._replace(file) if is_whole else self._grow(file))
            except RelaySilent:
                raise
            except (OSError, FileUnavailable) as error:
                failure = error
        if failure is not None:
            raise failure
        return copied

    def _is_theirs(self, path: str) -> bool:
        """Return True if relays copy this file, and it is of a process of that node."""
        try:
            owner = rule_of(path)[1]
        except PathRefused:
            owner = path
        if owner in ("", *self.source.processes):
            return True
        if path not in self._refused:
            self._refused.add(path)
            logger.info("%s lists %s, which is not of its node", self.source.server.name, path)
        return False

    async def _grow(self, file: files.FileInfo) -> int:
        copied = 0
        held = await asyncio.to_thread(self._mirror.held, file.path)
        while held < file.size:
            size = min(files.PART_BYTES, file.size - held)
            await self._pace.take(size)
            part = await self._client.read(file.path, held, size)
            if not part.data:
                break
            await asyncio.to_thread(self._mirror.add, file.path, held, part.data)
            held += len(part.data)
            copied += len(part.data)
        return copied

    async def _replace(self, file: files.FileInfo) -> int:
        if await asyncio.to_thread(self._mirror.has, file):
            return 0  # it may have come from here
        copied = await fetch_whole(self._client, self._mirror, file, self._pace)
        if file.path.startswith(UNFINISHED):  # only the run's folder expires them
            await self._client.remove(file)
        return copied

    def connect_again(self) -> None:
        """Replace the connection: one without answers may be broken undetected."""
        self.close()
        self._client = FileClient(self.source.server)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


async def fetch_whole(client: FileClient, mirror: Mirror, file: files.FileInfo, pace: Pace) -> int:
    """Copy a file as a whole, or not at all; return its bytes.

    Raises FileUnavailable if it is not served, or is replaced during the copy; OSError of the disk.
    """
    copy = await asyncio.to_thread(mirror.copy_for, file.path)
    try:
        done = 0
        while done < file.size:
            await pace.take(min(files.PART_BYTES, file.size - done))
            part = await client.read(file.path, done)
            if not done:  # it may have been replaced since it was listed
                file = files.FileInfo(file.path, part.size, part.changed)
            if (part.size, part.changed) != (file.size, file.changed) or not part.data:
                raise FileUnavailable(f"{client.server.name}: {file.path} changed during the copy")
            await asyncio.to_thread(_append, copy, part.data)
            done += len(part.data)
        await asyncio.to_thread(mirror.replace, file, copy)
    finally:
        await asyncio.to_thread(copy.unlink, missing_ok=True)
    return done


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


class Puller:
    """Copies the files of several nodes to the run's folder. Create it within the event loop."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pace = Pace(BYTES_PER_SECOND)
        self._nodes: dict[files.Server, _Node] = {}
        self.pulled_bytes = 0

    def follow(self, sources: tuple[FileSource, ...]) -> None:
        """Copy the files of these nodes, and of no others, from now on."""
        for gone in self._nodes.keys() - {source.server for source in sources}:
            self._nodes.pop(gone).end()
        for source in sources:
            node = self._nodes.get(source.server)
            if node is None:
                self._nodes[source.server] = _Node(Copying(self._root, source, self._pace), self)
            else:
                node.copying.source = source

    async def finish(self, seconds: float) -> dict[str, str]:
        """Copy what is left, at most this long; return the relays with missing files, and why.

        The processes of all nodes have ended, so a round that begins now copies everything.
        """
        goals = {node: node.rounds + 2 for node in self._nodes.values()}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(node.reach(goal) for node, goal in goals.items()))
        return {
            node.copying.source.server.name: node.trouble or f"not done within {seconds:.0f} s"
            for node, goal in goals.items()
            if node.rounds < goal
        }

    @property
    def nodes(self) -> tuple[int, int]:
        """Number of nodes whose files are copied, and of those whose last round failed."""
        return len(self._nodes), sum(bool(node.trouble) for node in self._nodes.values())

    def close(self) -> None:
        """End all copying."""
        self.follow(())


class _Node:
    def __init__(self, copying: Copying, puller: Puller) -> None:
        self.copying = copying
        self._puller = puller
        self.rounds = 0
        self.trouble = ""
        self._wake, self._rounded = asyncio.Event(), asyncio.Condition()
        self._task = asyncio.create_task(self._run())

    async def reach(self, rounds: int) -> None:
        """Wait for this many completed rounds, without pauses between them."""
        while self.rounds < rounds:
            self._wake.set()
            async with self._rounded:
                await self._rounded.wait()

    async def _run(self) -> None:
        try:
            while True:
                pause = await self._round()
                async with self._rounded:
                    self._rounded.notify_all()
                if self.trouble:
                    await asyncio.sleep(_BREATH_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            self.copying.close()

    async def _round(self) -> float:
        name = self.copying.source.server.name
        try:
            self._puller.pulled_bytes += await self.copying.round()
        except (FileUnavailable, PathRefused, OSError) as error:
            if not self.trouble:
                logger.warning("cannot copy files of %s, trying again: %s", name, error)
            self.trouble = str(error)
            self.copying.connect_again()
            return RETRY_SECONDS
        self.rounds += 1
        if self.trouble:
            logger.info("files of %s are copied again", name)
        self.trouble = ""
        return PULL_SECONDS

    def end(self) -> None:
        self._task.cancel()
