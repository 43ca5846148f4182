"""Keeps run-ahead over a restart of the whole run: saved with each checkpoint, then restored.

    CheckpointWritten ──► SaveUnfinished to every generator ──► unfinished/step-V/GENERATOR.bin
    --resume from V ──► index of each file ──► `SampleRequests` ──► Generate names the tokens' place

Tokens do not pass through the controller: generators write and read them. Only `verify` mode keeps
run-ahead, since the other modes cannot verify tokens.

Samples of leaving generators, on their way to other generators with their tokens.

    ReleaseSamples ──► Release ──► unfinished/moved/GENERATOR.bin ──► Released
    index of the file, checked ──► `SampleRequests` ──► Generate names the tokens' place

Tokens do not pass through the controller. A file that cannot be used is named, and its samples are
generated again. A file stays until all its samples are trained on or given up, since a generator
may be about to read it. Copies on nodes that do not see the run's folder stay until the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from asyncrl.config.by_step import ConfigByStep
from asyncrl.config.run_config import RunConfig
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.runs.resuming import moved_folder, remove_moved, remove_unfinished, unfinished_folder
from asyncrl.scheduler.commands import ReleaseSamples
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.wire.messages.from_generator import Released
from asyncrl.wire.messages.to_generator import Release, SaveUnfinished
from asyncrl.wire.messages.unfinished_samples import Index, UnfinishedRefused, read_index

logger = logging.getLogger(__name__)


class UnfinishedWork:
    """Has generators save their run-ahead, and finds it when the run is resumed.

    Args:
        config: of the run.
        path: the run's folder.
        fleet: the generators.
        requests: are told of the samples that can be restored.
        say: shows a sentence to the user.
    """

    def __init__(
        self,
        config: RunConfig,
        path: Path,
        fleet: Fleet,
        requests: SampleRequests,
        say: Callable[[str], None],
    ) -> None:
        self.config = ConfigByStep(config)
        """Of the run. Orders of the user replace it."""
        self._path = path.resolve()
        self._fleet = fleet
        self._requests = requests
        self._say = say
        self._settings = settings_digest(config)

    async def save(self, version: int, *, published: int, first_group: int | None = None) -> None:
        """The checkpoint of this version is written: have the run-ahead saved.

        Args:
            version: of the checkpoint.
            published: newest published version. Samples of later steps than it makes due have not
                been delivered anywhere, so none is missing because of its contents.
            first_group: with dynamic sampling, the same is true of this group and all later ones.
        """
        if not self.config.verifies:
            return
        if first_group is None:
            first_group = self.config.admission.last_deliverable_group(published) + 1
        try:
            await asyncio.to_thread(remove_unfinished, self._path, unless=self._is_kept(version))
        except OSError as error:
            logger.warning("unfinished run-ahead is not saved: %s", error)
            return
        folder = unfinished_folder(self._path, version)
        for worker in self._fleet.generators():
            command = SaveUnfinished(
                str(folder / f"{worker.name}.bin"),
                version,
                self._settings,
                first_group=first_group,
            )
            await self._fleet.send(worker.name, command)

    def _is_kept(self, version: int) -> Callable[[int], bool]:
        """Whether to keep the files of a step: its checkpoint exists and is not the new one."""
        checkpoints = self._path / "checkpoints"
        return lambda step: step != version and path_of(checkpoints, step).is_dir()

    async def restore(self, version: int) -> None:
        """The run continues from this checkpoint: find the samples to continue."""
        if not self.config.verifies:
            return
        files = sorted(unfinished_folder(self._path, version).glob("*.bin"))
        restored = 0
        for file in files:
            try:
                index = await asyncio.to_thread(read_unfinished, file, version, self._settings)
            except UnfinishedRefused as error:
                self._say(f"{error}; its samples are generated again")
                continue
            self._requests.add_unfinished(str(file), index.places)
            restored += len(index.places)
        paths = [file.relative_to(self._path).as_posix() for file in files]
        for reason in await self._fleet.files.bring_to_all(paths):
            self._say(f"{reason}; its samples are generated again")
        if restored:
            self._say(f"unfinished samples to continue: {restored}, from {file.parent}")


def read_unfinished(file: Path, version: int, settings: str) -> Index:
    """The index of a file that goes with this version.

    Raises:
        UnfinishedRefused: it does not, its tokens were drawn in another way, or it is damaged.
    """
    index = read_index(file)
    if index.version != version:
        raise UnfinishedRefused(f"{file} goes with step {index.version}, not {version}")
    if index.settings != settings:
        raise UnfinishedRefused(f"{file} was written with other sampling settings")
    return index


def settings_digest(config: RunConfig) -> str:
    """Stands for what the tokens of a sample were drawn with, besides the model.

    Tokens that lenient reuse has accepted do not follow the distribution that is recorded with
    them, so no verification makes them exact.
    """
    engine = config.engine
    text = f"{config.sampling.model_dump_json()} {engine.top_k_logprobs} {engine.max_model_len}"
    if config.cache.reuse == "lenient":
        text += " lenient"
    if config.environment.name is not None:
        one = config.environment
        text += f" {one.name} {one.args} {one.max_turns} {one.history}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


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
