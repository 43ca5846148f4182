"""JSON Lines files that stay readable when their writer is killed.

Whole lines are passed to the operating system, so a killed process leaves at most one incomplete
line, at the end; the next writer removes it and readers ignore it. Numbers that JSON lacks (nan,
infinities) are written as null.
"""

from __future__ import annotations

import contextlib
import logging
import numbers
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from asyncrl.monitoring.errors import RecordError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_CHUNK = 1 << 16


class DiskThread:
    """Makes one call at a time on a daemon thread, so that a hanging disk cannot stop callers."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._returned = threading.Event()
        self._returned.set()
        self._thread = threading.Thread(target=self._serve, name="disk", daemon=True)
        self._thread.start()

    def begin(self, call: Callable[[], None]) -> None:
        """Queue a call, which must not raise, after earlier ones."""
        self._returned.clear()
        self._calls.put(call)

    def has_returned(self, seconds: float) -> bool:
        """Wait up to this long; return True if the call has returned. Only one may be begun."""
        return self._returned.wait(seconds)

    def end(self) -> None:
        """Let the thread end after its calls. Nothing may be begun afterwards."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._returned.set()


def _plain_number(value: Any) -> Any:
    """Convert numpy's scalars, which msgspec does not know."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


class JsonlWriter:
    """Appends objects to `path`, in a folder that it creates."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_incomplete_line(path)
        self.path = path
        self._encoder = msgspec.json.Encoder(enc_hook=_plain_number)
        self._file = path.open("ab")

    def append(self, *records: object) -> None:
        """Write one line per record and flush. Raises ValueError if closed, or OSError."""
        data = b"".join(self._encoder.encode(record) + b"\n" for record in records)
        if data:
            self._file.write(data)
            self._file.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


class RetryingJsonlWriter(Generic[T]):
    """Appends records whose loss is worse than a delay.

    If the disk is full, unwritable or hangs, lines stay in memory, up to `keep_bytes`, and are
    written before the next ones; the beginning and the end of such a period are logged. A write
    that takes longer than `patience_seconds` hangs: it is waited for once.
    """

    def __init__(
        self, path: Path, *, keep_bytes: int = 1 << 24, patience_seconds: float = 5.0
    ) -> None:
        self.path = path
        self.dropped = 0
        self._keep_bytes = keep_bytes
        self._patience_seconds = patience_seconds
        self._encoder = msgspec.json.Encoder(enc_hook=_plain_number)
        self._file: FileIO | None = None
        self._disk = DiskThread()
        self._waiting = bytearray()
        self._attempt: _Attempt | None = None
        self._failing = False
        self._closed = False
        self._write()

    def append(self, *records: T) -> None:
        """Write one line per record, or keep it. Raises ValueError if the writer was closed."""
        if self._closed:
            raise ValueError(f"the writer of {self.path} is closed")
        for record in records:
            line = self._encoder.encode(record) + b"\n"
            if len(self._waiting) + len(line) > self._keep_bytes and self._failing:
                self.dropped += 1
            else:
                self._waiting += line
        self._write()

    def flush(self) -> bool:
        """Try to write waiting lines; return True if none is left."""
        if not self._closed:
            self._write()
        return not self._waiting

    def close(self) -> None:
        """Close the file. Idempotent. Lines that cannot be written even now are logged."""
        if self._closed:
            return
        self._write()
        self._closed = True
        lost = self._waiting.count(b"\n") + self.dropped
        if lost:
            logger.warning("%d lines of %s could not be written", lost, self.path)
        self._disk.begin(self._close_file)
        self._disk.has_returned(self._patience_seconds if self._attempt is None else 0.0)
        self._disk.end()

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _write(self) -> None:
        if self._attempt is None:
            self._attempt = _Attempt(bytes(self._waiting))
            self._disk.begin(partial(self._try, self._attempt))
            seconds = self._patience_seconds
        else:
            seconds = 0.0  # it hangs, and was waited for once
        if not self._disk.has_returned(seconds):
            self._note_failure(f"no answer from the disk for {self._patience_seconds:g} s")
            return
        attempt, self._attempt = self._attempt, None
        # A part of a line that was written now is completed by the next attempt.
        del self._waiting[: attempt.written]
        if attempt.error is not None:
            self._note_failure(attempt.error.strerror or str(attempt.error))
        elif seconds == 0.0:
            self._write()  # the lines that came while it hung
        else:
            if self._failing:
                logger.warning("%s can be written now; %d lines are lost", self.path, self.dropped)
            self._failing = False

    def _note_failure(self, why: str) -> None:
        if not self._failing:
            text = "cannot write %s: %s. Its lines are kept in memory and written when possible"
            logger.warning(text, self.path, why)
        self._failing = True

    def _try(self, attempt: _Attempt) -> None:
        """Write these lines on the thread, as far as the disk takes them."""
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _remove_incomplete_line(self.path)
                self._file = self.path.open("ab", buffering=0)
            data = memoryview(attempt.data)
            while attempt.written < len(data):
                attempt.written += self._file.write(data[attempt.written :]) or 0
        except OSError as error:
            attempt.error = error


@dataclass(slots=True)
class _Attempt:
    """A write and its result; its fields belong to the thread until it has returned."""

    data: bytes
    written: int = 0
    error: OSError | None = None


def _remove_incomplete_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        keep = end
        while keep > 0:
            start = max(0, keep - _CHUNK)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < end:
            file.truncate(keep)


def read_jsonl(path: Path, kind: type[T], *, missing_ok: bool = False) -> list[T]:
    """Read the whole lines of `path` as `kind`. Raises FileNotFoundError, RecordError."""
    try:
        records, errors = read_undamaged(path, kind)
    except FileNotFoundError:
        if missing_ok:
            return []
        raise
    if errors:
        raise errors[0]
    return records


def read_undamaged(path: Path, kind: type[T]) -> tuple[list[T], list[RecordError]]:
    """Read like `read_jsonl`, but return undecodable lines as errors; raises FileNotFoundError."""
    records: list[T] = []
    errors: list[RecordError] = []
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for number, line in enumerate(whole_lines(file), start=1):
            try:
                if line.strip():
                    records.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                errors.append(RecordError(path, number, str(error)))
    return records, errors


def undamaged(lines: bytes, kind: type[T]) -> Iterator[T]:
    """Decode lines; damaged ones are left out, as the run reports them when it reads the file."""
    decoder = msgspec.json.Decoder(kind)
    for line in lines.split(b"\n"):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            if line.strip():
                yield decoder.decode(line)


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines up to the first one without its newline, which is still being written."""
    for line in file:
        if not line.endswith(b"\n"):
            return
        yield line


def read_tail(path: Path, kind: type[T], max_bytes: int) -> list[T]:
    """Read the last whole, undamaged lines in `max_bytes`; empty without the file."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - max_bytes - 1)
            file.seek(start)
            data = file.read(max_bytes + 1)
    except OSError:
        return []
    whole = data.rpartition(b"\n")[0]
    if start:
        whole = whole.partition(b"\n")[2]  # the first line may have lost its start
    return list(undamaged(whole, kind))
