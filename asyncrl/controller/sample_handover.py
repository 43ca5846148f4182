"""Samples of leaving generators, on their way to other generators with their tokens.

    ReleaseSamples ──► Release ──► unfinished/moved/GENERATOR.bin ──► Released
    index of the file, checked ──► `SampleRequests` ──► Generate names the tokens' place

Tokens do not pass through the controller. A file that cannot be used is named, and its samples are
generated again. A file stays until all its samples are trained on or given up, since a generator
may be about to read it. Copies on nodes that do not see the run's folder stay until the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from asyncrl.config.run_config import RunConfig
from asyncrl.controller.unfinished_work import read_unfinished, settings_digest
from asyncrl.runs.resuming import moved_folder, remove_moved
from asyncrl.scheduler.commands import ReleaseSamples
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.wire.messages.from_generator import Released
from asyncrl.wire.messages.to_generator import Release
from asyncrl.wire.messages.unfinished_samples import UnfinishedRefused

logger = logging.getLogger(__name__)


class FileSharing(Protocol):
    """Brings a file of one generator to the nodes of the others."""

    async def share(self, file: str, generator: str) -> None:
        """Return when the file of this generator is there, or cannot be; bounded.

        It keeps its path. The controller reads it at that path too. Where it is missing, samples
        are generated again.
        """


class SharedFolder:
    """All processes see the run's folder, so there is nothing to do."""

    async def share(self, file: str, generator: str) -> None:
        """Return at once."""


class Moves:
    """Asks leaving generators for their samples, and finds these in the files that they write.

    Args:
        config: of the run.
        path: the run's folder.
        requests: are told of the samples that can be continued.
        say: shows a sentence to the user.
        sharing: brings files to other nodes.
    """

    def __init__(
        self,
        config: RunConfig,
        path: Path,
        requests: SampleRequests,
        say: Callable[[str], None],
        sharing: FileSharing | None = None,
    ) -> None:
        self._run = path.resolve()
        self._requests = requests
        self._say = say
        self._sharing = sharing or SharedFolder()
        self._settings = settings_digest(config)
        self._asked: dict[str, Release] = {}
        self._last_groups: dict[Path, int] = {}
        """The last group of which a file has samples, or may get them."""

    def request(self, command: ReleaseSamples, version: int) -> Release:
        """The message to a generator that leaves.

        Args:
            command: of the scheduler.
            version: newest policy version, which the file names.
        """
        path = moved_folder(self._run) / f"{command.generator}.bin"
        self._last_groups[path] = max(sample.group for sample in command.samples)
        message = Release(str(path), version, self._settings, command.samples)
        self._asked[command.generator] = message
        return message

    async def take(
        self, generator: str, answer: Released, *, is_lost: Callable[[], bool] = lambda: False
    ) -> None:
        """The samples can be started elsewhere: with the tokens in the file, if it is good.

        Args:
            generator: that leaves.
            answer: its own.
            is_lost: whether it was lost meanwhile; then they have been started elsewhere.
        """
        asked = self._asked.pop(generator, None)
        if asked is None or asked.file != answer.file:
            return
        try:
            if answer.reason:
                raise UnfinishedRefused(answer.reason)
            await self._sharing.share(answer.file, generator)
            index = await asyncio.to_thread(
                read_unfinished, Path(answer.file), asked.policy_version, self._settings
            )
            if is_lost():
                raise UnfinishedRefused("it was lost before its samples could move")
            wanted = frozenset(asked.samples)
            places = [place for place in index.places if place.sample in wanted]
            self._requests.add_moved(answer.file, places)
            self._say(f"{generator} leaves; samples that move with their tokens: {len(places)}")
        except UnfinishedRefused as error:
            self._say(f"{generator} leaves: {error}; its samples are generated again")

    async def forget_before(self, group: int) -> None:
        """Groups before this one are settled: remove the files that have samples of no others."""
        self._requests.forget_before(group)
        for path in [one for one, last in self._last_groups.items() if last < group]:
            del self._last_groups[path]
            try:
                await asyncio.to_thread(path.unlink, missing_ok=True)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", path, error.strerror)

    def remove_files(self) -> None:
        """Remove the files; nothing reads them any more."""
        with contextlib.suppress(OSError):
            remove_moved(self._run)
