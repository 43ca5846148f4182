"""Unfinished samples on disk: saved with each checkpoint, or moved by a generator that leaves."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.engine.errors import EngineError
from asyncrl.generator.background import BackgroundTasks, ControllerLine
from asyncrl.generator.sample_table import Unfinished
from asyncrl.generator.weight_installs import WeightInstalls
from asyncrl.rollout.trajectory import KeptTokens, SampleId
from asyncrl.wire.messages import from_generator, to_generator
from asyncrl.wire.messages.unfinished_samples import (
    UnfinishedRefused,
    UnfinishedSample,
    read_sample,
    write_unfinished,
)

logger = logging.getLogger("asyncrl.generator")


@dataclass(eq=False)
class UnfinishedFiles:
    """Saves and restores the tokens of undelivered samples.

    Failures do not end the run: without a file, samples are generated again. `_installs` copies the
    tokens between two installations of weights; `_tasks` write in the background; `_forget` drops
    samples; `_here` maps the controller's path of a file to this node's (`GeneratorSpec.here`).
    """

    _installs: WeightInstalls
    _tasks: BackgroundTasks
    _controller: ControllerLine
    _forget: Callable[[Sequence[SampleId]], None]
    _here: Callable[[str], Path]
    _saving: asyncio.Task[None] | None = field(default=None, init=False)
    _first_group: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._copied = asyncio.Event()
        self._copied.set()

    def save(self, command: to_generator.SaveUnfinished) -> None:
        """Copy the tokens of all samples and write them, without blocking other commands.

        Deliveries wait for the copy (`copied`). Nothing is saved while a file is being written.
        """
        if self._saving is not None and not self._saving.done():
            logger.warning("%s is not written: an earlier file is still incomplete", command.file)
            return
        self._copied.clear()
        self._first_group = command.first_group
        self._saving = self._tasks.start(self._save(command))

    async def copied(self, group: int) -> None:
        """Wait until a sample of this group may leave: its tokens are copied, if they are to be.

        A file without the samples that were finished and delivered first would lack short ones.
        """
        if group >= self._first_group:
            await self._copied.wait()

    async def _save(self, command: to_generator.SaveUnfinished) -> None:
        try:
            found = await self._installs.unfinished(lambda one: one.group >= command.first_group)
        except EngineError as error:
            logger.warning("%s is not written: %s", command.file, error)
            return
        finally:
            self._copied.set()
        await self._write(command, found)

    async def release(self, command: to_generator.Release) -> None:
        """Copy the samples' tokens, forget the samples, write the tokens, and report it."""
        samples = frozenset(command.samples)
        reason, found = "", list[Unfinished]()
        try:
            found = await self._installs.unfinished(samples.__contains__)
        except EngineError as error:
            reason = f"{command.file} is not written: {error}"
            logger.warning("%s", reason)
        self._forget(command.samples)
        if not reason:
            reason = await self._write(command, found)
        name = self._controller.generator
        await self._controller.send(from_generator.Released(name, command.file, reason))

    async def read(self, command: to_generator.Generate) -> KeptTokens | None:
        """Read the tokens that a sample begins with, if there are usable ones."""
        if command.unfinished is None:
            return None
        try:
            file, place = self._here(command.unfinished.file), command.unfinished.place
            prompt = command.prompt.prompt_id
            return await asyncio.to_thread(read_sample, file, place, prompt_id=prompt)
        except UnfinishedRefused as error:
            logger.warning("sample %s is generated again: %s", command.sample, error)
            return None

    async def _write(
        self, command: to_generator.SaveUnfinished | to_generator.Release, found: list[Unfinished]
    ) -> str:
        samples = [UnfinishedSample.of(*one) for one in found]
        path, version = self._here(command.file), command.policy_version
        try:
            await asyncio.to_thread(write_unfinished, path, version, command.settings, samples)
        except OSError as error:
            logger.warning("cannot write %s: %s", path, error.strerror)
            return f"cannot write {path}: {error.strerror}"
        return ""
