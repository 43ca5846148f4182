"""The two files of a node: its engines read one while the next version arrives in the other."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from asyncrl.wire.messages.chain import Ask
from asyncrl.wire.weights.chain.cached_version import Held
from asyncrl.wire.weights.chain.serving import State
from asyncrl.wire.weights.chunks import CHUNK_BYTES, Grid, alike, trainer_of
from asyncrl.wire.weights.files import mark, reserve
from asyncrl.wire.weights.layout import WRITING, WeightManifest

_PAST = 64
"""Versions that are remembered as gone."""


@dataclass(slots=True)
class _File:
    path: Path
    trainer: str = ""
    """Whose versions are in it, see `trainer_of`."""
    memory: mmap.mmap | None = None
    held: Held | None = None


class NodeFiles:
    """Versions of one run in this node's memory, in the layout in which the trainer publishes.

    The header of a file names a version only while the whole version is in it. It names no trainer,
    and one that replaces another may publish a number again, so each trainer has files of its own.

    Args:
        directory: in memory, usually /dev/shm.
        files_id: names the files; unique on this machine.
        chunk_bytes: of every node of the chain.

    Raises:
        PublishError: by `begin`: there is no memory for them.
    """

    def __init__(self, directory: Path, files_id: str, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._prefix = str(directory / f"asyncrl-{files_id}-weights-")
        self._files = [_File(Path(f"{self._prefix}{i}")) for i in range(2)]
        self._numbers = len(self._files)
        """Files so far."""
        self._chunk_bytes = chunk_bytes
        self._newest: _File | None = None
        """The file with the newest whole version."""
        self._arriving: _File | None = None
        self._past: dict[str, None] = {}

    @property
    def base(self) -> Held | None:
        """The whole version that a delta to the arriving one may refer to."""
        one, other = self._newest, self._arriving
        if one is None or one.held is None or other is None or other.held is None:
            return None
        return one.held if alike(one.held.manifest, other.held.manifest) else None

    def begin(self, manifest: WeightManifest) -> Held:
        """Make room for a version, in place of the one before the newest, or of one given up.

        Raises:
            PublishError: there is no memory for it.
            WeightsReadError: no file has this size.
        """
        grid = Grid(manifest.nbytes, self._chunk_bytes)
        self.give_up()
        file = next(file for file in self._files if file is not self._newest)
        self._drop(file)
        self._belong_to(file, trainer_of(manifest))
        if file.memory is None or len(file.memory) != manifest.nbytes:
            file.memory = None  # freed with its last reader
            file.memory = reserve(file.path, manifest.nbytes, of=len(self._files))
        memory = file.memory
        mark(memory, WRITING)
        file.held = Held(
            manifest, np.frombuffer(memory, np.uint8), lambda: True, grid, set(range(grid.count))
        )
        self._past.pop(file.held.name, None)
        self._arriving = file
        return file.held

    def finish(self) -> WeightManifest:
        """The arriving version is whole: let engines read it. Its manifest on this node."""
        file = self._arriving
        if file is None or file.held is None or file.held.missing or file.memory is None:
            raise ValueError("no version is whole")
        mark(file.memory, file.held.manifest.policy_version)
        self._newest, self._arriving = file, None
        return msgspec.structs.replace(file.held.manifest, path=str(file.path))

    def give_up(self) -> None:
        """Forget the arriving version. Idempotent."""
        if self._arriving is not None:
            self._drop(self._arriving)
            self._arriving = None

    def local(self, version: str) -> WeightManifest | None:
        """The manifest on this node of the newest whole version, if it is that one."""
        file = self._newest
        if file is None or file.held is None or file.held.name != version:
            return None
        return msgspec.structs.replace(file.held.manifest, path=str(file.path))

    def state(self, version: str, index: int) -> State:
        """Of a chunk. A version that this node has not heard of may come."""
        held = self._by_name(version)
        if held is None:
            return State.GONE if version in self._past else State.COMING
        if index >= held.grid.count:
            return State.GONE
        return State.COMING if index in held.missing else State.HERE

    def to_send(self, ask: Ask) -> tuple[Held, Held | None]:
        """The version that a chunk here belongs to, and the base for it."""
        held = self._by_name(ask.version)
        if held is None:
            raise KeyError(ask.version)
        base = None if ask.base is None else self._by_name(ask.base)
        same = base is not None and alike(base.manifest, held.manifest)
        return held, base if same else None

    def close(self) -> None:
        """Remove the files. A reader that has one open can finish. Idempotent."""
        self._newest = self._arriving = None
        for file in self._files:
            file.held = None
            if file.memory is not None:
                file.memory = None
                file.path.unlink(missing_ok=True)

    def _belong_to(self, file: _File, trainer: str) -> None:
        """A file of another trainer is removed, and this one gets another name."""
        if file.trainer not in ("", trainer):
            file.memory = None
            file.path.unlink(missing_ok=True)
            file.path = Path(f"{self._prefix}{self._numbers}")
            self._numbers += 1
        file.trainer = trainer

    def _by_name(self, version: str) -> Held | None:
        held = (file.held for file in self._files if file.held is not None)
        return next((one for one in held if one.name == version), None)

    def _drop(self, file: _File) -> None:
        if file.held is not None:
            self._past[file.held.name] = None
            file.held = None
        while len(self._past) > _PAST:
            del self._past[next(iter(self._past))]
        if file.memory is not None:
            mark(file.memory, WRITING)
