"""The copies of one node's files in the run's folder, or in another node's.

A growing file is copied from where the copy ends, to the same offset as at its source. So an
interrupted copy continues there, and two relays may copy at once. A file may have older contents,
of an earlier start of the run: RUN/.pulled/FOLDER.jsonl has their size. The lines of samples.jsonl
go to RUN/.pulled/FOLDER.samples first, then to RUN/samples.jsonl, which has those of all nodes.

Relays copy only these files of a run's folder:

    logs/NAME.log  timeline/NAME.jsonl  engine/NAME.jsonl  slots/NAME.jsonl     they only grow
    samples.jsonl                                                                it only grows
    recent/NAME.jsonl  cache/NAME.snapshot  unfinished/FOLDER/NAME.bin           replaced as a whole

NAME is a process. No other file is opened, served or written, least of all keys or checkpoints.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import msgspec

from asyncrl.wire.messages.files import FileInfo
from asyncrl.wire.transport.atomic_files import write_atomically

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
SAMPLES = "samples.jsonl"
UNFINISHED = "unfinished/"
_FOLDERS = ("logs", "timeline", "engine", "slots", "recent", "cache", "unfinished")


class Kind(Enum):
    """The way a file changes."""

    GROWS = 1
    """Bytes are appended; existing ones stay."""
    SAMPLES = 2
    """The same, and the lines of all nodes belong to one file."""
    WHOLE = 3


_RULES = (
    (re.compile(rf"logs/({_NAME})\.log"), Kind.GROWS),
    (re.compile(rf"(?:timeline|engine|slots)/({_NAME})\.jsonl"), Kind.GROWS),
    (re.compile(rf"recent/({_NAME})\.jsonl"), Kind.WHOLE),
    (re.compile(rf"cache/({_NAME})\.snapshot"), Kind.WHOLE),
    (re.compile(rf"unfinished/{_NAME}/({_NAME})\.bin"), Kind.WHOLE),
)


class PathRefused(ValueError):  # noqa: N818 - names the event
    """A path that relays do not copy."""


def rule_of(path: str) -> tuple[Kind, str]:
    """Return how a file changes, and its process (empty if several). Raises PathRefused."""
    if path == SAMPLES:
        return Kind.SAMPLES, ""
    for pattern, kind in _RULES:
        if found := pattern.fullmatch(path):
            return kind, found[1]
    raise PathRefused(f"{path[:100]!r} is not a file that relays copy")


def files_of(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below a folder that relays copy, without links."""
    candidates = [root / SAMPLES]
    for folder in _FOLDERS:
        top = root / folder
        if top.is_symlink():
            continue
        with contextlib.suppress(OSError):  # there is none
            for entry in sorted(top.iterdir()):
                deeper = folder == "unfinished" and not entry.is_symlink() and entry.is_dir()
                candidates += sorted(entry.iterdir()) if deeper else [entry]
    for path in candidates:
        relative = path.relative_to(root).as_posix()
        with contextlib.suppress(OSError, PathRefused):
            rule_of(relative)
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                yield relative, found


@contextlib.contextmanager
def folder_below(root: Path, path: str, *, make: bool) -> Iterator[int]:
    """Open the folder of a file below a folder, without following links; return a descriptor.

    Raises PathRefused for a file that is not copied; OSError without the folder, if not `make`.
    """
    rule_of(path)
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in path.split("/")[:-1]:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=at)
            below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = below
        yield at
    finally:
        os.close(at)


def open_below(root: Path, path: str, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a file that relays copy. Raises PathRefused; OSError if it is not a regular file."""
    with folder_below(root, path, make=bool(flags & os.O_CREAT)) as folder:
        name = path.rpartition("/")[2]
        found = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(f"{path} is not a regular file")
    return found


PULLED = ".pulled"
_TAIL_BYTES = 1 << 20
_FILE_MODE = 0o644
_PART = ".part"


class _Base(msgspec.Struct, frozen=True):
    """A line of RUN/.pulled/FOLDER.jsonl."""

    path: str
    bytes: int


class Mirror:
    """Copies of one node's folder, by its id. Every method may wait for the disk."""

    def __init__(self, root: Path, folder: str) -> None:
        self._root = root
        self._notes = root / PULLED
        self._folder = folder
        self._bases: dict[str, int] | None = None
        self._replaced: dict[str, FileInfo] = {}

    def held(self, path: str) -> int:
        """Return the bytes of a growing file that are here. Raises OSError."""
        if path == SAMPLES:
            size = self._size(self._notes / f"{self._folder}.samples")
            if size:
                self._merge_samples()  # an earlier copy may have ended before it was
            return size
        base = self._all_bases().get(path)
        return 0 if base is None else max(0, self._size(self._root / path) - base)

    def add(self, path: str, offset: int, data: bytes) -> None:
        """Append to the `held` bytes. Raises OSError."""
        if path == SAMPLES:
            self._notes.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            file = os.open(self._notes / f"{self._folder}.samples", flags, 0o600)
            base = 0
        else:
            base = self._base(path)
            file = open_below(self._root, path, os.O_WRONLY | os.O_CREAT, _FILE_MODE)
        try:
            _write_at(file, base + offset, data)
        finally:
            os.close(file)
        if path == SAMPLES:
            self._merge_samples()

    def has(self, info: FileInfo) -> bool:
        """Return True if this version of a file that is replaced as a whole is here."""
        try:
            found = (self._root / info.path).lstat()
        except OSError:
            return False
        if self._replaced.get(info.path) == info:
            return True  # a disk may keep no nanoseconds
        return (found.st_size, found.st_mtime_ns) == (info.size, info.changed)

    def replace(self, info: FileInfo, copy: Path) -> None:
        """Rename a complete copy into place. Raises OSError."""
        os.utime(copy, ns=(info.changed, info.changed))
        with folder_below(self._root, info.path, make=True) as folder:
            os.replace(copy, info.path.rpartition("/")[2], dst_dir_fd=folder)
        self._replaced[info.path] = info

    def remove_remains(self) -> None:
        """Remove a killed relay's leftovers. Raises OSError."""
        for copy in self._notes.glob(f"*{_PART}"):
            copy.unlink(missing_ok=True)

    def copy_for(self, path: str) -> Path:
        """Create an empty file for a copy. Raises OSError."""
        rule_of(path)
        self._notes.mkdir(mode=0o700, exist_ok=True)
        copy = self._notes / f"{self._folder}-{secrets.token_hex(8)}{_PART}"
        os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        return copy

    @staticmethod
    def _size(path: Path) -> int:
        try:
            return path.lstat().st_size
        except FileNotFoundError:
            return 0

    def _base(self, path: str) -> int:
        """Return the size of the file's older contents, recorded before the first copy."""
        bases = self._all_bases()
        if path in bases:
            return bases[path]
        file = open_below(self._root, path, os.O_RDWR | os.O_CREAT, _FILE_MODE)
        try:
            base = _whole_lines(file) if path.endswith(".jsonl") else os.fstat(file).st_size
        finally:
            os.close(file)
        self._notes.mkdir(mode=0o700, exist_ok=True)
        with (self._notes / f"{self._folder}.jsonl").open("ab") as notes:
            # A crash may have cut off the line before.
            notes.write(b"\n" + msgspec.json.encode(_Base(path, base)) + b"\n")
            notes.flush()
            os.fsync(notes.fileno())
        self._bases = None
        return self._all_bases()[path]  # if two relays record it, the first record counts

    def _all_bases(self) -> dict[str, int]:
        if self._bases is None:
            self._bases = {}
            with contextlib.suppress(FileNotFoundError):
                lines = (self._notes / f"{self._folder}.jsonl").read_bytes().splitlines()
                for line in lines:
                    with contextlib.suppress(msgspec.DecodeError):  # cut off by a crash
                        note = msgspec.json.decode(line, type=_Base)
                        self._bases.setdefault(note.path, note.bytes)
        return self._bases

    def _merge_samples(self) -> None:
        source, mark = (self._notes / f"{self._folder}.{end}" for end in ("samples", "merged"))
        merged = 0
        with contextlib.suppress(FileNotFoundError, ValueError):
            merged = int(mark.read_text(encoding="ascii"))
        with source.open("rb") as file:
            file.seek(merged)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        if not new:
            return
        target = open_below(self._root, SAMPLES, os.O_RDWR | os.O_CREAT | os.O_APPEND, _FILE_MODE)
        try:
            size = os.fstat(target).st_size
            tail = os.pread(target, _TAIL_BYTES + len(new), max(0, size - _TAIL_BYTES - len(new)))
            known = set(tail.splitlines(keepends=True))  # by a relay that ended before the mark
            lines = b"".join(x for x in new.splitlines(keepends=True) if x not in known)
            if tail and not tail.endswith(b"\n"):
                lines = b"\n" + lines  # a writer was cut off by a full disk
            if os.write(target, lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(target)
        write_atomically(mark, str(merged + len(new)))


def _whole_lines(file: int) -> int:
    """Remove an incomplete last line, which a killed writer left; return the size."""
    size = os.fstat(file).st_size
    tail = os.pread(file, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
    keep = size - len(tail) + tail.rfind(b"\n") + 1
    if keep != size:
        os.ftruncate(file, keep)
    return keep


def _write_at(file: int, place: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, place)
        place, view = place + written, view[written:]
