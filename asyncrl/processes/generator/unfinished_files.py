"""Unfinished run-ahead on the disk: written with each checkpoint, read when the run is resumed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from asyncrl.processes.generator.background import BackgroundTasks
from asyncrl.processes.generator.weight_installs import WeightInstalls
from engine.errors import EngineError
from rollout.trajectory import KeptTokens
from wire.messages import to_generator
from wire.unfinished import UnfinishedRefused, UnfinishedSample, read_sample, write_unfinished

logger = logging.getLogger("asyncrl.generator")


class UnfinishedFiles:
    """Saves and restores the tokens of samples that are not delivered.

    Neither can end the run: without a file, a resumed run generates its samples again.

    Args:
        installs: copies the tokens of all samples, between two installations of weights.
        tasks: write in the background.
    """

    def __init__(self, installs: WeightInstalls, tasks: BackgroundTasks) -> None:
        self._installs = installs
        self._tasks = tasks
        self._writing: asyncio.Task[None] | None = None

    async def save(self, command: to_generator.SaveUnfinished) -> None:
        """Copy the tokens now, before a later command is served, and write them meanwhile.

        Nothing is saved while the previous file is still being written.
        """
        if self._writing is not None and not self._writing.done():
            logger.warning("%s is not written: an earlier one still is", command.file)
            return
        try:
            found = await self._installs.unfinished(command.first_group)
        except EngineError as error:
            logger.warning("%s is not written: %s", command.file, error)
            return
        samples = [UnfinishedSample.of(*one) for one in found]
        self._writing = self._tasks.start(self._write(command, samples))

    async def _write(
        self, command: to_generator.SaveUnfinished, samples: list[UnfinishedSample]
    ) -> None:
        path, version = Path(command.file), command.policy_version
        try:
            await asyncio.to_thread(write_unfinished, path, version, command.settings, samples)
        except OSError as error:
            logger.warning("cannot write %s: %s", path, error.strerror)

    async def read(self, command: to_generator.Generate) -> KeptTokens | None:
        """The tokens that a sample begins with; None if there are none or they are unusable."""
        if command.unfinished is None:
            return None
        try:
            return await asyncio.to_thread(
                read_sample,
                Path(command.unfinished.file),
                command.unfinished.place,
                prompt_id=command.prompt.prompt_id,
            )
        except UnfinishedRefused as error:
            logger.warning("sample %s is generated again: %s", command.sample, error)
            return None
