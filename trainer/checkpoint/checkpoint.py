"""Checkpoints: each one is complete or absent.

They are written to a temporary directory, which is then renamed. `trainer.checkpoint.format` has
the manifest and finds them, `asyncrl.trainer.checkpoint.export` makes models of them.

```
checkpoints/step-000012/
  state/            weights, optimizer and random states: safetensors files of each rank, and
                    index.json, which locates each tensor
  adapter/          adapter_config.json, if the weights are an adapter's (`trainer.lora`)
  model/            a Hugging Face directory without its weights: configuration, tokenizer
  steps.jsonl       the trainer's records of the steps since the previous checkpoint
  manifest.json     format, policy version (also the data cursor: steps trained), settings, and
                    size and digest of every other file; written last
```

    begin (between two steps) ──► copied while training continues ──► write (in a thread):
    files ──► digests ──► manifest ──► synced ──► not given up, not superseded ──► renamed

Nothing in a checkpoint is a pickle, so reading one never runs its writer's code.
"""

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from torch.cuda import Stream
from transformers import AutoTokenizer, PreTrainedModel

from asyncrl.trainer.base.errors import CheckpointError, CheckpointUnwritable
from asyncrl.trainer.checkpoint.format.files import (
    STEPS,
    check_space,
    remove_remains,
    set_aside,
    unwritable,
    verified,
)
from asyncrl.trainer.checkpoint.format.index import INDEX, STATE, Part, merge, part_path, read_index
from asyncrl.trainer.checkpoint.format.manifest import Published, check_settings, write_manifest
from asyncrl.trainer.checkpoint.format.tensors import Held, held_by, load_tensors, write_tensors
from asyncrl.trainer.checkpoint.trainer_lease import UNFENCED, TrainerLease
from asyncrl.trainer.lora.files import ADAPTER, write_settings
from asyncrl.trainer.model.memory_estimate import memory_left
from asyncrl.trainer.optimizer.training_state import TrainingState
from asyncrl.trainer.ranks.world import World, this_machine
from asyncrl.wire.messages.from_trainer import CheckpointFault
from asyncrl.wire.records.step import TrainedStep
from asyncrl.wire.transport.atomic_files import replacing, sync

logger = logging.getLogger(__name__)

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".msgpack", ".h5")
_LOOK_SECONDS = 0.02
_FAULTS = (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, SafetensorError)
"""Errors of reading a checkpoint that is not as written."""


class Snapshot:
    """Copies what a rank holds to host memory, in a thread; one at a time, into reused buffers.

    Weights and moments change in an optimizer step only, so training waits for a copy only before
    the next one (`wait`). The buffers take as much host memory as this rank's part of the state (12
    bytes a parameter, divided by the ranks): touching fresh pages costs more than the copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.Size], Tensor] = {}
        self._copying: threading.Thread | None = None
        self._error: BaseException | None = None

    def take(self, held: Sequence[Held]) -> list[Held]:
        """Begin to copy, once an earlier copy is done; the tensors are filled after `wait`."""
        self._join()
        buffers = {_key(one): self._buffers.get(_key(one)) for one in held}
        self._buffers = {}  # free what no longer fits first
        for one in held:
            kept = buffers[_key(one)]
            if kept is None:
                like = one.local
                kept = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[_key(one)] = kept
        twins = [replace(one, box=replace(one.box, local=self._buffers[_key(one)])) for one in held]
        streams = _side_streams(held)
        self._error = None
        self._copying = threading.Thread(
            target=self._copy, args=(held, twins, streams), name="snapshot", daemon=True
        )
        self._copying.start()
        return twins

    def needed(self, held: Sequence[Held]) -> int:
        """Bytes of additional host memory that a copy takes.

        Torch rounds page-locked memory, used for a GPU's tensors, up to powers of two.
        """
        new = [one.local for one in held if _key(one) not in self._buffers]
        return sum(
            1 << (one.nbytes - 1).bit_length() if one.is_cuda and one.nbytes else one.nbytes
            for one in new
        )

    @staticmethod
    def lacks(needed: int) -> str:
        """Explain if this machine or container lacks memory for this many bytes; else return ""."""
        left = memory_left()
        if left is None or needed <= left:
            return ""
        return f"a copy of the training state takes {needed} bytes of memory, and {left} are left"

    def wait(self) -> float:
        """Wait until everything is copied; return the seconds. Raises what the copy raised."""
        began = time.monotonic()
        self._join()
        if self._error is not None:  # for both waiters: training and the writer
            raise self._error
        return time.monotonic() - began

    def _join(self) -> None:
        if (thread := self._copying) is not None:
            thread.join()
            self._copying = None

    def _copy(
        self, held: Sequence[Held], copies: Sequence[Held], streams: dict[torch.device, Stream]
    ) -> None:
        try:
            with torch.no_grad():
                for one, copy in zip(held, copies, strict=True):
                    _copy_one(one.local, copy.local, streams.get(one.local.device))
            for stream in streams.values():
                stream.synchronize()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error


def _key(one: Held) -> tuple[str, torch.dtype, torch.Size]:
    return one.name, one.local.dtype, one.local.shape


def _side_streams(held: Sequence[Held]) -> dict[torch.device, Stream]:
    """Create a stream for each GPU, behind what is queued there."""
    streams = {}
    for device in {one.local.device for one in held if one.local.is_cuda}:
        streams[device] = Stream(device)
        streams[device].wait_stream(torch.cuda.current_stream(device))
    return streams


def _copy_one(source: Tensor, target: Tensor, stream: Stream | None) -> None:
    if stream is not None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
    elif source.is_contiguous():
        # One thread, without the interpreter's lock; torch would take all cores from training.
        np.copyto(_bytes_of(target), _bytes_of(source))
    else:
        target.copy_(source)


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    data: NDArray[np.uint8] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return data


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a checkpoint, besides the steps."""

    state: TrainingState
    model: PreTrainedModel
    model_path: str
    """Source of the run's model; its tokenizer files are copied from there."""
    policy_version: int
    settings: dict[str, Any]
    """Every setting that shapes the run, as JSON types."""
    initial_weights: str
    """Digest of the weights that the run started from; empty if unknown."""
    published: Published | None = None
    """Digest of this version's published weights, if they were published."""
    adapter: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """This process's part of a checkpoint, and the folder that all ranks share."""

    rank: int = 0
    ranks: int = 1
    word: str = field(default_factory=lambda: os.urandom(8).hex())
    """Part of the temporary folder's name, the same for all ranks and unique to the checkpoint:
    trainers in two containers may share a process id."""
    seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """The rest of a checkpoint, after `read` has set the state."""

    policy_version: int
    initial_weights: str
    values: dict[str, Any]


def pending(contents: Contents, snapshot: Snapshot | None, world: World) -> "Pending":
    """Prepare a checkpoint of all ranks; without `snapshot` the state is not copied. Collective."""
    held = held_by(contents.state.boxes(world.rank), world.rank)
    needed = 0 if snapshot is None else snapshot.needed(held)
    all_needed = world.gather(f"{needed} {this_machine()}".encode(), "memory of a checkpoint")
    lacking = "" if snapshot is None else snapshot.lacks(_needed_here(all_needed))
    if lacking:
        text = "trainer.async_checkpoints: training waits until this checkpoint is written: %s"
        logger.warning(text, lacking)
    if world.any(bool(lacking), "whether there is memory for a checkpoint"):
        snapshot = None
    word = world.gather(Place().word.encode(), "the name of a checkpoint")[0].decode()
    return Pending(contents, held, snapshot, Place(world.rank, world.size, word))


def _needed_here(gathered: Sequence[bytes]) -> int:
    """Sum the bytes that all ranks of this machine need, from each rank's "bytes machine"."""
    here, all_needed = this_machine(), (one.decode().partition(" ") for one in gathered)
    return sum(int(count) for count, _, machine in all_needed if machine == here)


class Pending:
    """A checkpoint whose state is fixed and that is not written yet.

    `held` is what this rank writes. Without `snapshot` the state must not change before `write`.
    """

    def __init__(
        self,
        contents: Contents,
        held: Sequence[Held],
        snapshot: Snapshot | None = None,
        place: Place | None = None,
    ) -> None:
        self._contents, self._place, self._snapshot = contents, place or Place(), snapshot
        self._values = contents.state.plain()
        self._held = held if snapshot is None else snapshot.take(held)

    @property
    def is_copied(self) -> bool:
        """True if training may continue before it is written."""
        return self._snapshot is not None

    def write(
        self,
        directory: Path,
        steps: Sequence[TrainedStep] = (),
        given_up: threading.Event | None = None,
        fence: TrainerLease = UNFENCED,
    ) -> None:
        """Write it to `directory` atomically; ranks other than 0 write their part.

        A checkpoint of that name, and newer ones, are moved to `set-aside/`: they belong to another
        course of the run. `steps` are the records since the previous checkpoint. If another thread
        sets `given_up`, the result may be inconsistent and is removed.

        Raises Superseded if this is no longer the run's trainer; CheckpointUnwritable if the disk
        refused it, or it was given up. Then nothing of it is left, and no other is removed.
        """
        if self._snapshot is not None:
            self._snapshot.wait()
        temporary = directory.with_name(f".{directory.name}.{self._place.word}.writing")
        needed = sum(one.local.nbytes for one in self._held)
        fence.check()
        if self._place.rank:
            try:
                with unwritable(directory, needed):
                    self._write_part(temporary)
            except CheckpointUnwritable as error:
                failed = _failed_path(temporary, self._place.rank)
                with contextlib.suppress(OSError), replacing(failed) as file:
                    file.write(msgspec.json.encode((error.cause, str(error))))
                raise
            return
        with unwritable(directory, needed):
            try:
                directory.parent.mkdir(parents=True, exist_ok=True)
                remove_remains(directory.parent, unless=temporary)
                check_space(directory.parent, needed)
                self._fill(temporary, steps, given_up)
                if given_up is not None and given_up.is_set():
                    raise CheckpointUnwritable(f"writing {directory} was given up", "hanging")
                fence.check()
                if directory.exists():
                    set_aside(directory.parent, newer_than=self._contents.policy_version - 1)
                temporary.rename(directory)
                sync(directory.parent)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def _write_part(self, temporary: Path) -> Part:
        """Write this rank's files; ranks other than 0 record them on the disk."""
        (temporary / STATE).mkdir(parents=True, exist_ok=True)
        part = write_tensors(temporary, self._held, self._place.rank)
        if self._place.rank:
            with replacing(part_path(temporary, self._place.rank)) as file:
                file.write(msgspec.json.encode(part))
        return part

    def _fill(
        self, temporary: Path, steps: Sequence[TrainedStep], given_up: threading.Event | None
    ) -> None:
        contents = self._contents
        parts = [self._write_part(temporary), *self._other_parts(temporary, given_up)]
        digests = {name: one for part in parts for name, one in part.files.items()}
        (temporary / INDEX).write_bytes(msgspec.json.encode(merge(parts, self._values)))
        model = temporary / "model"
        contents.model.config.save_pretrained(model)
        if contents.model.generation_config is not None:
            contents.model.generation_config.save_pretrained(model)
        _copy_tokenizer(contents.model_path, model)
        if contents.adapter is not None:
            write_settings(temporary / ADAPTER, contents.adapter)
        lines = [msgspec.json.encode(step) + b"\n" for step in steps]
        (temporary / STEPS).write_bytes(b"".join(lines))
        write_manifest(
            temporary,
            policy_version=contents.policy_version,
            settings=contents.settings,
            initial_weights=contents.initial_weights,
            published=contents.published,
            known=digests,
        )
        for path in [*temporary.rglob("*"), temporary]:
            if path.relative_to(temporary).as_posix() not in digests:  # those are on the disk
                sync(path)

    def _other_parts(self, temporary: Path, given_up: threading.Event | None) -> list[Part]:
        found: list[Part] = []
        until = time.monotonic() + self._place.seconds
        for rank in range(1, self._place.ranks):
            path = part_path(temporary, rank)
            while not _is_there(path):
                failed = _failed_path(temporary, rank)
                if _is_there(failed) and (text := failed.read_bytes()):
                    cause, said = msgspec.json.decode(text, type=tuple[CheckpointFault, str])
                    raise CheckpointUnwritable(f"rank {rank}: {said}", cause)
                if (given_up is not None and given_up.is_set()) or time.monotonic() > until:
                    raise CheckpointUnwritable(
                        f"rank {rank} has not written its part {path} within "
                        f"{self._place.seconds:.0f} s; all ranks must share the run's folder",
                        "hanging",
                    )
                time.sleep(_LOOK_SECONDS)
            found.append(msgspec.json.decode(path.read_bytes(), type=Part))
            path.unlink()
        return found


def read(directory: Path, state: TrainingState, settings: dict[str, Any], rank: int = 0) -> Loaded:
    """Load a checkpoint of any number of ranks into `state`, with random states; return the rest.

    Raises CheckpointError if it is incomplete, or of another format, model or settings.
    """
    manifest = verified(directory)
    check_settings(directory, manifest, settings)
    try:
        index = read_index(directory)
        targets, rest = state.targets(index, rank)
        load_tensors(directory, index, targets)
        rest.apply()
    except CheckpointError as error:
        if str(directory) in str(error):
            raise
        raise CheckpointError(f"{directory}: {error}") from error
    except _FAULTS as error:
        raise CheckpointError(
            f"cannot read the checkpoint {directory}: {type(error).__name__}: {error}"
        ) from error
    return Loaded(manifest.policy_version, manifest.initial_weights or "", rest.values)


def _is_there(path: Path) -> bool:
    """Return True if a file exists, by listing its folder.

    A network file system may cache the absence of a file, once it was looked up, for half a minute.
    """
    return path.name in os.listdir(path.parent)  # noqa: PTH208 - names only


def _failed_path(temporary: Path, rank: int) -> Path:
    return part_path(temporary, rank).with_suffix(".failed")


def _copy_tokenizer(model_path: str, target: Path) -> None:
    """Copy the model's other files (tokenizer, chat template) that `target` lacks."""
    source = Path(model_path)
    if not source.is_dir():
        AutoTokenizer.from_pretrained(model_path, trust_remote_code=False).save_pretrained(target)
        return
    for path in source.iterdir():
        is_other = path.is_file() and not path.name.endswith(_WEIGHTS)
        if is_other and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
