"""`samples.jsonl` and `recent/`: a few trajectories of a run, for people to read.

samples.jsonl has one of every n-th step, `recent/NAME.jsonl` a few of a generator's last steps.
"""

import contextlib
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from asyncrl.monitoring.records.jsonl import DiskThread, RetryingJsonlWriter, read_jsonl, read_tail

logger = logging.getLogger(__name__)

RECENT = "recent"
_RECENT_BYTES = 1 << 18
_TAIL_BYTES = 4 << 20
_NEWEST_FILES = 16
"""Files of `recent/` that are read; the others are older."""
_PATIENCE_SECONDS = 5.0

TokenProvenance = Literal["sampled", "drafted", "verified", "observed"]
"""Origin of a token: a name of `asyncrl.rollout.trajectory.Provenance` in lower case."""


class SampleSegment(msgspec.Struct, frozen=True):
    """Tokens `[start, end)` follow the distribution of one policy version."""

    policy_version: int
    start: int
    end: int


class SampleRecord(msgspec.Struct, frozen=True):
    """One trajectory with its text; L is the number of response tokens."""

    step: int
    """The optimizer step that trained on it; for an evaluation, the policy version."""
    prompt: str
    tokens: list[str]
    """`[L]` text of each response token."""
    provenance: list[TokenProvenance]
    segments: list[SampleSegment]
    """Ascending; they cover `[0, L)`."""
    reward: float | None
    answer: str | None = None
    logprobs: list[float | None] | None = None
    """`[L]` behaviour log-probabilities; None where not finite."""
    sample_id: str = ""
    finish_reason: str = ""
    contexts: list[int] = []
    """Tokens at which the model's context begins anew: nothing before them is read after them."""
    rewards: dict[str, float | None] = {}
    """Unweighted terms of the reward: the result of each reward function, and the environment's
    part. None where one does not apply; empty if one of them failed, which counts as 0."""
    evaluation: str = ""
    """The held-out set of an evaluation's sample, drawn after `step` steps; empty: trained on."""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if len(self.provenance) != n or (self.logprobs is not None and len(self.logprobs) != n):
            raise ValueError(
                f"sample {self.sample_id or self.step}: {n} tokens, {len(self.provenance)} "
                "provenances"
                + ("" if self.logprobs is None else f", {len(self.logprobs)} log-probabilities")
            )

    def count(self, provenance: TokenProvenance) -> int:
        """Count the tokens of this provenance."""
        return self.provenance.count(provenance)

    @property
    def turns(self) -> int:
        """Number of the policy's turns: runs of tokens without an environment's."""
        own = [one != "observed" for one in self.provenance]
        return sum(one and not before for one, before in zip(own, [False, *own], strict=False))

    def version_at(self, position: int) -> int | None:
        """Policy version of the token at `position`; None outside all segments."""
        for segment in self.segments:
            if segment.start <= position < segment.end:
                return segment.policy_version
        return None


class SampleLog(RetryingJsonlWriter[SampleRecord]):
    """Appends trajectories to `path`."""

    def append(self, *records: SampleRecord) -> None:
        """Write the records; lone surrogates, which UTF-8 cannot encode, become question marks."""
        super().append(*map(_writable, records))


class RecentSamples:
    """Keeps the newest trajectories of one process in the file `path`, up to 256 KiB.

    The file is replaced as a whole. A disk that hangs is waited for once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: tuple[bytes, ...] = ()
        self._disk = DiskThread()
        self._patience = _PATIENCE_SECONDS
        self._has_failed = False

    def append(self, record: SampleRecord) -> None:
        """Add a record, and drop the oldest ones beyond the limit."""
        lines = [*self._lines, msgspec.json.encode(_writable(record)) + b"\n"]
        while len(lines) > 1 and sum(map(len, lines)) > _RECENT_BYTES:
            del lines[0]
        self._lines = tuple(lines)
        self._save()

    def forget(self) -> None:
        """Leave out of the file what was added until now, from the next record on."""
        self._lines = ()

    def close(self) -> None:
        """Write what the disk did not take in time. Idempotent."""
        if self._patience == 0.0:
            self._save()
        self._disk.end()

    def _save(self) -> None:
        if self._disk.has_returned(0.0):
            self._disk.begin(partial(self._write, self._lines))
        done = self._disk.has_returned(self._patience)
        self._patience = _PATIENCE_SECONDS if done else 0.0

    def _write(self, lines: Sequence[bytes]) -> None:
        part = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(b"".join(lines))
            part.replace(self._path)
        except OSError as error:
            if not self._has_failed:
                logger.warning("cannot write %s: %s", self._path, error.strerror)
            self._has_failed = True
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def _writable(record: SampleRecord) -> SampleRecord:
    def clean(text: str) -> str:
        return text.encode("utf-8", "replace").decode("utf-8")

    return msgspec.structs.replace(
        record,
        prompt=clean(record.prompt),
        tokens=[clean(token) for token in record.tokens],
        answer=None if record.answer is None else clean(record.answer),
    )


def read_samples(path: Path) -> list[SampleRecord]:
    """Read all records in the order of the file; empty without it. Raises RecordError."""
    return read_jsonl(path, SampleRecord, missing_ok=True)


def trained_on(records: Iterable[SampleRecord]) -> list[SampleRecord]:
    """Select records that are not of an evaluation."""
    return [one for one in records if not one.evaluation]


def recent_files(run: Path) -> list[Path]:
    """The files of `recent/` in a run's folder, changed last first."""

    def changed(path: Path) -> float:
        with contextlib.suppress(OSError):
            return path.stat().st_mtime
        return 0.0

    return sorted((run / RECENT).glob("*.jsonl"), key=changed, reverse=True)


def newest_samples(run: Path, count: int) -> list[SampleRecord]:
    """The last recorded samples that a run was trained on, from the files' ends, oldest first."""
    spread = trained_on(read_tail(run / "samples.jsonl", SampleRecord, _TAIL_BYTES))
    return _last(with_recent(run, spread), count)


def with_recent(
    run: Path, spread: Sequence[SampleRecord], most: int | None = None
) -> list[SampleRecord]:
    """Add samples of `recent/`, at most the last `most`, to those of samples.jsonl, by step."""
    known = {(one.step, one.sample_id) for one in spread}
    files = recent_files(run)[:_NEWEST_FILES]
    read = (one for path in files for one in read_tail(path, SampleRecord, _TAIL_BYTES))
    recent = [one for one in read if (one.step, one.sample_id) not in known]
    recent.sort(key=lambda one: one.step)
    added = recent if most is None else _last(recent, most)
    return sorted([*spread, *added], key=lambda one: one.step)


def _last(records: list[SampleRecord], count: int) -> list[SampleRecord]:
    return records[-count:] if count else []


def choose_samples(records: Iterable[SampleRecord], max_samples: int) -> list[SampleRecord]:
    """Choose up to `max_samples` records, evenly spread over the run, first and last included."""
    everything = sorted(records, key=lambda record: record.step)
    if max_samples <= 0:
        return []
    if len(everything) <= max_samples:
        return everything
    if max_samples == 1:
        return [everything[-1]]
    last = len(everything) - 1
    return [everything[round(i * last / (max_samples - 1))] for i in range(max_samples)]
