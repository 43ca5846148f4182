"""Two relays in this process: one sees the run's folder, the other one has a folder of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from asyncrl.launch.child_spec import files_hub
from asyncrl.relay.files import RelayFiles
from asyncrl.wire import RunKey
from asyncrl.wire.messages import files, from_relay, to_relay

KEY = RunKey.new()
PATIENCE = 60


def source(name: str, ready: from_relay.FilesReady, *processes: str) -> to_relay.FileSource:
    return to_relay.FileSource(server(name, ready), ready.folder, processes)


def server(name: str, ready: from_relay.FilesReady) -> files.Server:
    return files.Server(name, ready.address, KEY.line(files_hub(name), "relay-0"))


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        if condition():
            return
        assert time.monotonic() < deadline, "it did not come"
        await asyncio.sleep(0.001)


class Relays:
    """A relay that sees the run's folder, and one that does not."""

    def __init__(self, path: Path) -> None:
        self.said: list[Any] = []
        self.run, self.node = path / "run", path / "node"
        for folder in (self.run, self.node):
            folder.mkdir(exist_ok=True)
        self.home = self._relay("relay-0", self.run, shares=True)
        self.other = self._relay("relay-1", self.node, shares=False)

    def _relay(self, name: str, root: Path, *, shares: bool) -> RelayFiles:
        return RelayFiles(
            root,
            shares=shares,
            address="tcp://127.0.0.1:*",
            keys=KEY.hub(files_hub(name)),
            say=self.said.append,
        )

    def follow(self, *processes: str) -> None:
        theirs = source("relay-1", self.other.ready, *processes)
        self.home.pull(to_relay.PullFiles((theirs,)))

    async def finish(self, seconds: float = PATIENCE) -> dict[str, str]:
        self.home.finish(to_relay.FinishPull(seconds))
        await self.hear(from_relay.PullFinished)
        return dict(self.said.pop().left)

    async def hear(self, kind: type) -> Any:
        await until(lambda: any(isinstance(one, kind) for one in self.said))
        return self.said[-1]

    def close(self) -> None:
        self.home.close()
        self.other.close()


def with_relays(path: Path, work: Callable[[Relays], Awaitable[None]]) -> None:
    async def run() -> None:
        relays = Relays(path)
        try:
            await work(relays)
        finally:
            relays.close()

    asyncio.run(run())


def write(root: Path, path: str, data: bytes) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    with (root / path).open("ab") as file:
        file.write(data)
