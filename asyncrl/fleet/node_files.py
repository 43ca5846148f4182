"""Files of nodes that do not see the run's folder: which relay copies them, and where to.

    relays that are ready ──► one that sees the run's folder copies the files of those that do not
    a file that moves     ──► `bring`: the relay of a node fetches it

The run waits for no copy but the last one, for a limited time.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.fleet.process_state import RelayWorker, Worker
from asyncrl.fleet.relays import Relays
from asyncrl.launch.child_spec import files_hub
from asyncrl.wire import Hub, RunKey
from asyncrl.wire.messages import from_relay, to_relay
from asyncrl.wire.messages.files import Server

logger = logging.getLogger(__name__)

BRING_SECONDS = 30.0


@dataclass(eq=False)
class NodeFiles:
    """Orders relays to copy files. `_run_key` gives them the keys to each other."""

    _relays: Relays
    _run_key: RunKey
    _send: Callable[[str, Any], None]
    _run: Path
    _told: tuple[str, tuple[to_relay.FileSource, ...]] = ("", ())
    _seen: dict[str, to_relay.FileSource] = field(default_factory=dict)
    _node_of: dict[str, str] = field(default_factory=dict)
    _attempt: int = 0
    _attempts: dict[int, asyncio.Future[str]] = field(default_factory=dict)

    def update(self, workers: Iterable[Worker]) -> None:
        """Order a relay what to copy, if that has changed; `workers` are all ever started."""
        if not self._relays.are_used:
            return
        ready = self._relays.by_node()
        homes = [one.name for one in ready.values() if _sees_the_run(one)]
        if not homes:
            return
        copier = self._told[0] if self._told[0] in homes else homes[0]
        everyone = list(workers)
        self._node_of = {one.name: one.node for one in everyone if one.node is not None}
        sources: dict[str, to_relay.FileSource] = {}
        for node, relay in ready.items():
            if relay.ready_message is None or _sees_the_run(relay):
                continue
            names = {one.name for one in everyone if one.node == node}
            folder = relay.ready_message.files.folder
            if (same := sources.get(folder)) is not None:  # two of Ray's nodes on one machine
                names |= set(same.processes)
            theirs = tuple(sorted(names | set(self._relays.names_on(node))))
            sources[folder] = to_relay.FileSource(self._server(relay, copier), folder, theirs)
        self._seen |= sources
        told = copier, tuple(sources[folder] for folder in sorted(sources))
        if told != self._told and (told[1] or self._told[1]):
            self._told = told
            self._send(copier, to_relay.PullFiles(told[1]))

    async def finish(self, hub: Hub[Any], seconds: float) -> str:
        """Copy everything that is left, at most this long, after all processes but relays ended.

        Other messages that arrive stay in the hub. Then the nodes' folders are removed. Returns a
        message about files that were not copied; empty if all were.
        """
        copier, sources = self._told
        if not self._seen or seconds <= 0:
            return ""
        gone = [source for source in self._seen.values() if source not in sources]
        left = {source.server.name: "its node lacks a relay" for source in gone}
        if sources:
            self._send(copier, to_relay.FinishPull(seconds))
            finished = await _wait_for_the_end(hub, seconds + 5.0)
            silent = {one.server.name: f"{copier} did not answer" for one in sources}
            left |= silent if finished is None else finished
        for source in sources:
            if source.server.name not in left:
                self._send(source.server.name, to_relay.RemoveFiles())
        if not left:
            return ""
        listed = "; ".join(f"{name}: {why}" for name, why in sorted(left.items()))
        return (
            f"not all files of these nodes were copied to {self._run} ({listed}). The rest is "
            "still on those nodes, in asyncrl-RUN-ID of the folder of temporary files"
        )

    async def bring(self, path: str, *, to: str | None, of: str | None = None) -> str:
        """Bring a file of the run to a node; return why that was not possible, or "".

        `path` is in the run's folder; `to` is None for that folder itself, and `of`, the node that
        wrote it, is None if it is there.
        """
        ready = self._relays.by_node()
        homes = [one for one in ready.values() if _sees_the_run(one)]
        target = ready.get(to) if to is not None else next(iter(homes), None)
        theirs = ready.get(of or "")
        having = [one for one in ([theirs] if theirs else []) + homes if one is not target]
        if target is None or not having:
            return "" if target is not None and _sees_the_run(target) else "its node lacks a relay"
        attempt = self._attempt = self._attempt + 1
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._attempts[attempt] = answer
        # A separate name: a second connection of the same name would end the first, which copies.
        client = f"{target.name} fetch {attempt}"
        servers = tuple(self._server(one, client) for one in having)
        self._send(target.name, to_relay.FetchFile(attempt, path, servers))
        try:
            async with asyncio.timeout(BRING_SECONDS):
                return await answer
        except TimeoutError:
            return f"{target.name} did not bring {path} within {BRING_SECONDS:.0f} s"
        finally:
            del self._attempts[attempt]

    async def bring_to_all(self, paths: Iterable[str]) -> list[str]:
        """Bring files of the run's folder to every node that does not see it; return failures."""
        blind = [node for node, one in self._relays.by_node().items() if not _sees_the_run(one)]
        wanted = [self.bring(path, to=node) for path in paths for node in blind]
        return [reason for reason in await asyncio.gather(*wanted) if reason]

    async def share(self, file: str, generator: str) -> None:
        """Bring a generator's file, absolute and in the run's folder, there and to all other nodes.

        If it cannot be brought, samples are generated again.
        """
        if not self._seen:
            return
        path = Path(file).relative_to(self._run).as_posix()
        reasons = [await self.bring(path, to=None, of=self._node_of.get(generator))]
        reasons += await self.bring_to_all([path])
        for reason in filter(None, reasons):
            logger.warning("%s", reason)

    def answered(self, message: from_relay.FileHere | from_relay.FileMissing) -> None:
        """Take a relay's answer about a file."""
        waiting = self._attempts.get(message.attempt)
        if waiting is not None and not waiting.done():
            waiting.set_result(getattr(message, "reason", ""))

    def _server(self, relay: RelayWorker, client: str) -> Server:
        assert relay.ready_message is not None  # noqa: S101 - it is ready
        keys = self._run_key.line(files_hub(relay.name), client)
        return Server(relay.name, relay.ready_message.files.address, keys)


def _sees_the_run(relay: RelayWorker) -> bool:
    return relay.ready_message is not None and relay.ready_message.files.shares_run_directory


async def _wait_for_the_end(hub: Hub[Any], seconds: float) -> dict[str, str] | None:
    until, others = time.monotonic() + seconds, []
    try:
        while (remaining := until - time.monotonic()) > 0:
            async with asyncio.timeout(remaining):
                received = await hub.receive()
            if isinstance(received[1], from_relay.PullFinished):
                return dict(received[1].left)
            others.append(received)
    except TimeoutError:
        pass
    finally:
        hub.put_back(others)
    return None
