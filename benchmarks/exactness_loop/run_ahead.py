"""What outlives a killed run of the loop: its checkpoint, and the run-ahead saved with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asyncrl.config.run_config import parse_config
from asyncrl.controller.unfinished_work import UnfinishedWork
from asyncrl.runs.resuming import unfinished_folder
from asyncrl.scheduler.config import SchedulerConfig
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.wire.messages.to_generator import ToGenerator

_POLL_SECONDS = 0.001


class RunAhead:
    def __init__(
        self,
        generators: Callable[[], Sequence[str]],
        scheduler: SchedulerConfig,
        directory: Path,
        requests: SampleRequests,
        send: Callable[[str, ToGenerator], None],
    ) -> None:
        self._generators = generators
        self._directory = directory
        self._send = send
        config = parse_config({"scheduler": scheduler.model_dump()}, source="the loop")
        fleet: Any = SimpleNamespace(
            generators=lambda: [SimpleNamespace(name=name) for name in generators()],
            send=self._send_to,
            files=SimpleNamespace(bring_to_all=_bring),
        )
        self._work = UnfinishedWork(config, directory, fleet, requests, print)

    async def _send_to(self, name: str, message: ToGenerator) -> None:
        self._send(name, message)

    async def save(self, version: int, *, published: int) -> None:
        """The checkpoint of this version is written; returns when the run-ahead is on the disk."""
        await self._work.save(version, published=published)
        folder = unfinished_folder(self._directory, version)
        asked = set(self._generators())

        def missing() -> bool:
            asked.intersection_update(self._generators())  # one that leaves may not write it
            return not all((folder / f"{name}.bin").exists() for name in asked)

        while missing():  # noqa: ASYNC110 - threads write them
            await asyncio.sleep(_POLL_SECONDS)

    async def restore(self, version: int) -> None:
        await self._work.restore(version)


async def _bring(_paths: Iterable[str]) -> list[str]:
    return []
