"""Keeps run-ahead over a restart of the whole run: saved with each checkpoint, then restored.

    CheckpointWritten ──► SaveUnfinished to every generator ──► unfinished/step-V/GENERATOR.bin
    --resume from V ──► index of each file ──► `SampleRequests` ──► Generate names the tokens' place

Tokens do not pass through the controller: generators write and read them. Only `verify` mode keeps
run-ahead, since the other modes cannot verify tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

from asyncrl.config.by_step import ConfigByStep
from asyncrl.config.run_config import RunConfig
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.runs.resuming import remove_unfinished, unfinished_folder
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.trainer.checkpoint.format.files import path_of
from asyncrl.wire.messages.to_generator import SaveUnfinished
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
