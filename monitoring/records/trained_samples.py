"""`samples/000001.jsonl` and so on: every sample that a run has trained on, once, by step.

When a file is full the next number begins, and the oldest files are removed when all together
exceed a limit. Ranks from 1 on write `samples/000001-rank-1.jsonl` and so on. The trainer drops the
records of steps that it repeats before it adds any (`truncate`).
"""

import contextlib
import heapq
import logging
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from asyncrl.monitoring.records.jsonl import JsonlWriter, read_jsonl, read_tail, whole_lines
from asyncrl.monitoring.records.samples import SampleSegment

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20
"""Size at which the next file begins."""
_NAME = re.compile(r"(\d+)(?:-rank-(\d+))?\.jsonl")
_TAIL_BYTES = 8 << 20
_FILES_IN_LIMIT = 8
"""A limit is divided into at least this many files, so that removing one frees a small part."""


class TrainedSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One trajectory used by an optimizer step."""

    step: int
    group: int
    sample: int
    """Index in the group, from 0."""
    prompt_id: str
    prompt: str
    """Text of the prompt tokens, special tokens included, as the model sees them."""
    response: str
    """Text of the response tokens without special tokens, as reward functions get it."""
    reward: float
    finish_reason: str
    """`stop`, `length` or `deadline`: `asyncrl.rollout.trajectory.FinishReason`."""
    generator: str
    prompt_length: int
    response_length: int
    """Tokens of the response; the sum of the counts of tokens below."""
    segments: list[SampleSegment]
    """The policy versions that its tokens follow; in order, covering the response."""
    sampled: int
    """Tokens drawn without a draft."""
    drafted: int
    """Tokens drafted and accepted."""
    verified: int
    """Tokens drawn under an older version and accepted again."""
    observed: int = 0
    """Tokens of an environment, which are not trained on."""
    observed_at: list[tuple[int, int]] = []
    """Their places in the response: tokens `[start, end)`, ascending."""
    contexts: list[int] = []
    """Tokens of the response at which the model's context begins anew."""
    rewards: dict[str, float | None] = {}
    """Unweighted terms of the reward: the result of each reward function, and the environment's
    part. None where one does not apply; empty if one of them failed, which counts as 0."""
    prompt_tokens: list[int] | None = None
    """Ids, with `run.log_sample_tokens`, as the fields below."""
    response_tokens: list[int] | None = None
    provenance: str | None = None
    """A digit for each token of the response (`asyncrl.rollout.trajectory.Provenance`)."""
    behaviour_logprobs: list[float] | None = None
    """Log-probability with which each token was drawn; 0 for observed ones."""

    @property
    def sample_id(self) -> str:
        """The id that samples.jsonl has."""
        return f"{self.group}.{self.sample}"

    @property
    def turns(self) -> int:
        """Number of the policy's turns: pieces of the response between an environment's."""
        edges = [0, *(edge for piece in self.observed_at for edge in piece), self.response_length]
        return sum(start < end for start, end in zip(edges[::2], edges[1::2], strict=True))


class SampleFiles:
    """Appends records to a rank's newest file; removes its oldest beyond `limit_bytes` in all."""

    def __init__(self, folder: Path, *, limit_bytes: int, rank: int = 0) -> None:
        self._folder = folder
        self._rank = rank
        self._limit = limit_bytes
        self._file_bytes = min(MAX_FILE_BYTES, limit_bytes // _FILES_IN_LIMIT)
        self._writer: JsonlWriter | None = None

    def append(self, records: Sequence[TrainedSample]) -> None:
        """Write and flush records. Raises OSError; some may be written then, in whole lines."""
        try:
            if self._writer is None:
                files = sample_files(self._folder, self._rank)
                self._writer = JsonlWriter(files[-1] if files else self._path(1))
            self._writer.append(*records)
            if self._writer.path.stat().st_size >= self._file_bytes:
                self._writer.close()
                self._writer = JsonlWriter(self._path(_number(self._writer.path) + 1))
                self._remove_oldest()
        except OSError:
            writer, self._writer = self._writer, None
            with contextlib.suppress(OSError):  # closing writes what is buffered
                if writer is not None:
                    writer.close()
            raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _path(self, number: int) -> Path:
        rank = f"-rank-{self._rank}" if self._rank else ""
        return self._folder / f"{number:06d}{rank}.jsonl"

    def _remove_oldest(self) -> None:
        files = sample_files(self._folder, self._rank)
        total = sum(path.stat().st_size for path in files)
        while total > self._limit and len(files) > 1:
            oldest = files.pop(0)
            total -= oldest.stat().st_size
            oldest.unlink()


def sample_files(folder: Path, rank: int = 0) -> list[Path]:
    """A rank's files of a sample log, oldest first; empty without the folder."""
    return _files_by_rank(folder).get(rank, [])


def _files_by_rank(folder: Path) -> dict[int, list[Path]]:
    found: defaultdict[int, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob("*.jsonl"), key=_number):
        if name := _NAME.fullmatch(path.name):
            found[int(name[2] or 0)].append(path)
    return dict(sorted(found.items()))


def read_trained_samples(folder: Path) -> Iterator[TrainedSample]:
    """Read all records of a sample log, of all ranks, in step order. Raises RecordError."""
    records = map(_records, _files_by_rank(folder).values())
    yield from heapq.merge(*records, key=lambda record: record.step)


def _records(files: Sequence[Path]) -> Iterator[TrainedSample]:
    for path in files:
        yield from read_jsonl(path, TrainedSample)


def newest_trained(folder: Path, count: int) -> list[TrainedSample]:
    """The last records of a sample log in step order, of as many groups as possible."""
    found: list[TrainedSample] = []
    for files in _files_by_rank(folder).values():
        own: list[TrainedSample] = []
        for path in reversed(files):
            if len(own) < count:
                own = read_tail(path, TrainedSample, _TAIL_BYTES) + own
        found += own
    return sorted(found, key=lambda one: (one.step, -one.sample))[-count:]


def truncate(folder: Path, *, before_step: int) -> None:
    """Cut the records of `before_step` and later steps, which are trained again. Raises OSError."""
    for path, keep in _files_with(folder, before_step):
        if keep:
            os.truncate(path, keep)
        else:
            path.unlink()


def copy_later(folder: Path, target: Path, *, from_step: int) -> None:
    """Copy the files with records of `from_step` and later steps to the folder `target`.

    A file that `truncate` removes is hard-linked if the disk supports it. Raises OSError.
    """
    for path, keep in _files_with(folder, from_step):
        target.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # a disk without hard links, or another disk
            if not keep:
                os.link(path, target / path.name)
                continue
        shutil.copyfile(path, target / path.name)  # one that stays is cut and appended to


def _files_with(folder: Path, step: int) -> Iterator[tuple[Path, int]]:
    """Yield files with records from `step` on, newest first, and the bytes before these records."""
    for files in _files_by_rank(folder).values():
        for path in reversed(files):
            size = path.stat().st_size
            if size == 0:
                continue  # opened because the file before it is full
            keep = _bytes_before(path, step)
            if keep == size:
                break  # older files hold earlier steps only
            yield path, keep


def _bytes_before(path: Path, step: int) -> int:
    """Offset at which the last record before `step` ends."""
    keep = end = 0
    with path.open("rb") as file:
        for line in whole_lines(file):
            end += len(line)
            found = _step_of(line, path)
            if found is not None and found >= step:
                break
            if found is not None:
                keep = end
    return keep


class _Step(msgspec.Struct):
    step: int


_DECODER = msgspec.json.Decoder(_Step)


def _step_of(line: bytes, path: Path) -> int | None:
    try:
        return _DECODER.decode(line).step
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        logger.warning("%s has a damaged line: %s", path, error)
        return None


def _number(path: Path) -> int:
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name else 0
