"""Keeps run-ahead over a restart of the run, and moves samples of generators that leave.

    CheckpointWritten ──► SaveUnfinished to every generator ──► unfinished/step-V/GENERATOR.bin
    --resume from V ──► index of each file ──► `SampleRequests` ──► Generate names the tokens' place

    ReleaseSamples ──► Release ──► unfinished/moved/GENERATOR.bin ──► Released
    index of the file, checked ──► `SampleRequests` ──► Generate names the tokens' place

Tokens do not pass through the controller: generators write and read them. Only `verify` mode keeps
run-ahead, since the other modes cannot verify tokens. If a file cannot be used, a message names it
and its samples are generated again. A file of moved samples stays until all of them are trained on
or given up; copies on nodes that do not see the run's folder stay until the run ends.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from asyncrl.config.by_step import ConfigByStep
from asyncrl.config.run_config import RunConfig
from asyncrl.fleet.node_files import NodeFiles
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
    """Makes generators save run-ahead, and finds it in a resumed run for `requests`."""

    def __init__(
        self,
        config: RunConfig,
        path: Path,
        fleet: Fleet,
        requests: SampleRequests,
        say: Callable[[str], None],
    ) -> None:
        self.config, self._settings = ConfigByStep(config), settings_digest(config)
        self._path = path.resolve()
        self._fleet, self._requests, self._say = fleet, requests, say

    async def save(self, version: int, *, published: int, first_group: int | None = None) -> None:
        """Save the run-ahead, now that the checkpoint of this version is written.

        `published` is the newest published version. Samples of later steps than it makes due have
        not been delivered anywhere, so none is missing because of its contents; with dynamic
        sampling, the same is true of `first_group` and all later ones.
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
                str(folder / f"{worker.name}.bin"), version, self._settings, first_group=first_group
            )
            await self._fleet.send(worker.name, command)

    def _is_kept(self, version: int) -> Callable[[int], bool]:
        """Select steps whose files stay: their checkpoint exists and is not the new one."""
        checkpoints = self._path / "checkpoints"
        return lambda step: step != version and path_of(checkpoints, step).is_dir()

    async def restore(self, version: int) -> None:
        """Find the samples to continue, when the run resumes from this checkpoint."""
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
    """Read the index of a file of this version. Raises UnfinishedRefused if it is unusable."""
    index = read_index(file)
    if index.version != version:
        raise UnfinishedRefused(f"{file} belongs to step {index.version}, not {version}")
    if index.settings != settings:
        raise UnfinishedRefused(f"{file} was written with other sampling settings")
    return index


def settings_digest(config: RunConfig) -> str:
    """Digest of everything but the model that determines how a sample's tokens are drawn.

    Tokens that lenient reuse accepted follow another distribution than the recorded one.
    """
    engine = config.engine
    text = f"{config.sampling.model_dump_json()} {engine.top_k_logprobs} {engine.max_model_len}"
    if config.cache.reuse == "lenient":
        text += " lenient"
    if config.environment.name is not None:
        one = config.environment
        text += f" {one.name} {one.args} {one.max_turns} {one.history}"
        if one.max_turn_tokens is not None:
            text += f" {one.max_turn_tokens} a turn"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class SampleHandover:
    """Asks leaving generators for their samples, and finds these in the files that they write.

    `requests` receive samples to continue; `sharing` brings files to nodes that lack the folder.
    """

    def __init__(
        self,
        config: RunConfig,
        path: Path,
        requests: SampleRequests,
        say: Callable[[str], None],
        sharing: NodeFiles,
    ) -> None:
        self._run, self._settings = path.resolve(), settings_digest(config)
        self._requests, self._say, self._sharing = requests, say, sharing
        self._asked: dict[str, Release] = {}
        self._last_groups: dict[Path, int] = {}
        """Last group of which a file has samples, or may get them."""

    def request(self, command: ReleaseSamples, version: int) -> Release:
        """Build the message to a leaving generator; the file names the newest policy version."""
        path = moved_folder(self._run) / f"{command.generator}.bin"
        self._last_groups[path] = max(sample.group for sample in command.samples)
        message = Release(str(path), version, self._settings, command.samples)
        self._asked[command.generator] = message
        return message

    async def take(self, generator: str, answer: Released, *, is_lost: Callable[[], bool]) -> None:
        """Start the samples elsewhere, with the tokens in the file if it is usable."""
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
        """Remove the files that have only samples of settled groups, those before this one."""
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
