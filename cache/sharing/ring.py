"""A lock-free ring file with the last messages of one writer, for any number of readers.

    marks    magic 8 | format 4 | - 4 | capacity 8 || oldest 8 | end 8 | crc32 4
    message  position 8 | bytes 4 | crc32 4 | content, padded to 8 bytes

A *position* counts all bytes ever written; modulo `capacity` it is an offset in the file. The
writer first moves `oldest` past the bytes it is about to overwrite, then writes the message, then
moves `end`. So a writer killed at any instant leaves at worst unread bytes after `end`.

A reader copies the bytes between its position and `end`. Every message contains its position and a
checksum, so a message that was overwritten during the copy is detected, and the reader resumes at
`oldest`. A slow reader never delays the writer.

Files are read and written, not mapped: a truncated file or a full /dev/shm is then an error and not
a SIGBUS. All numbers are checked before they are used.
"""

import os
import stat
import struct
import weakref
import zlib
from collections import deque
from pathlib import Path

MAGIC = b"ringfile"
FORMAT = 1
MIN_CAPACITY, MAX_CAPACITY = 1 << 12, 1 << 30

_START = struct.Struct("<8sIIQ")
_MARKS = struct.Struct("<QQI")
_BASE = 64
_MESSAGE = struct.Struct("<QII")
_READ = 1 << 16


class ExchangeRefused(Exception):  # noqa: N818 - named for what was decided
    """An unusable directory of an exchange, or a file that is not a ring."""


def _crc(position: int, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(struct.pack("<QI", position, len(content))))


def _padded(size: int) -> int:
    return _MESSAGE.size + (size + 7) // 8 * 8


class RingWriter:
    """Creates the file under a temporary name and renames it; readers of an older one keep that.

    `capacity` bytes of messages, a multiple of 8, are allocated at once. Raises ValueError if it is
    out of bounds, OSError if the file cannot be created or lacks room.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        if not MIN_CAPACITY <= capacity <= MAX_CAPACITY or capacity % 8:
            raise ValueError(
                f"a ring's capacity must be a multiple of 8 from {MIN_CAPACITY} to "
                f"{MAX_CAPACITY} bytes, not {capacity}"
            )
        self._capacity = capacity
        self._oldest = self._end = 0
        self._sizes: deque[int] = deque()  # of the messages between oldest and end
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(temporary, flags, 0o600)
        self.leave = weakref.finalize(self, os.close, self._file)
        try:
            os.posix_fallocate(self._file, 0, _BASE + capacity)
            os.pwrite(self._file, _START.pack(MAGIC, FORMAT, 0, capacity), 0)
            self._publish()
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            self.leave()
            raise

    def write(self, content: bytes) -> int:
        """Append a message; return its bytes, or 0 if it exceeds a quarter of the ring.

        Raises OSError if the file cannot be written.
        """
        size = _padded(len(content))
        if size > self._capacity // 4:
            return 0
        if self._end + size - self._oldest > self._capacity:
            while self._end + size - self._oldest > self._capacity:
                self._oldest += self._sizes.popleft()
            self._publish()
        data = _MESSAGE.pack(self._end, len(content), _crc(self._end, content)) + content
        at = self._end % self._capacity
        fits = self._capacity - at
        os.pwrite(self._file, data[:fits], _BASE + at)
        if len(data) > fits:
            os.pwrite(self._file, data[fits:], _BASE)
        self._end += size
        self._sizes.append(size)
        self._publish()
        return size

    def _publish(self) -> None:
        marks = struct.pack("<QQ", self._oldest, self._end)
        os.pwrite(self._file, marks + struct.pack("<I", zlib.crc32(marks)), _START.size)


class RingReader:
    """Reads one file from its oldest message onwards. Raises ExchangeRefused or OSError."""

    def __init__(self, path: Path) -> None:
        self.position = 0
        self.overtaken = 0
        """Counter: bytes that were overwritten before they were read."""
        self.refused = 0
        """Counter: times that bytes were found which no writer wrote."""
        # Non-blocking: opening a pipe in place of the file must not wait for a writer of the pipe.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.open(path, flags)
        self.leave = weakref.finalize(self, os.close, self._file)
        try:
            self._capacity = self._checked(path)
        except BaseException:
            self.leave()
            raise

    def _checked(self, path: Path) -> int:
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ExchangeRefused(f"{path} is not a regular file of this user")
        start = os.pread(self._file, _START.size, 0)
        if len(start) < _START.size:
            raise ExchangeRefused(f"{path} is not a ring: it has only {len(start)} bytes")
        magic, version, _, capacity = _START.unpack(start)
        fits = MIN_CAPACITY <= capacity <= MAX_CAPACITY and capacity % 8 == 0
        if magic != MAGIC or version != FORMAT or not fits:
            raise ExchangeRefused(
                f"{path} is not a ring of format {FORMAT}: magic {magic!r}, format {version}, "
                f"capacity {capacity}"
            )
        return int(capacity)

    def read(self, limit: int = _READ) -> list[bytes]:
        """Return the next messages, about `limit` bytes, at least one. Raises OSError."""
        marks = self._read_marks()
        if marks is None:
            return []
        oldest, end = marks
        self._catch_up(oldest)
        if self.position > end:
            self._give_up(end)
        if self.position == end:
            return []
        messages, whole = self._messages(min(end - self.position, max(limit, _MESSAGE.size)))
        if not messages and whole is not None:  # the first message is longer than the limit
            messages, whole = self._messages(min(end - self.position, whole))
        if not messages:
            self._skip_unreadable(end)
        return messages

    def _read_marks(self) -> tuple[int, int] | None:
        """Return `oldest` and `end`; None if they are being written right now, or are damaged."""
        data = os.pread(self._file, _MARKS.size, _START.size)
        if len(data) < _MARKS.size:
            return None
        oldest, end, crc = _MARKS.unpack(data)
        if crc != zlib.crc32(data[:16]) or not oldest <= end <= oldest + self._capacity:
            return None
        return oldest, end

    def _messages(self, size: int) -> tuple[list[bytes], int | None]:
        """Return complete messages in the next `size` bytes, and the length of one cut off."""
        data = self._copy(size)
        messages: list[bytes] = []
        at = 0
        while at + _MESSAGE.size <= len(data):
            position, length, crc = _MESSAGE.unpack_from(data, at)
            whole = _padded(length)
            if position != self.position or whole > self._capacity // 4:
                return messages, None
            if at + whole > len(data):
                return messages, whole
            content = data[at + _MESSAGE.size : at + _MESSAGE.size + length]
            if _crc(position, content) != crc:
                return messages, None
            messages.append(content)
            at += whole
            self.position += whole
        return messages, _MESSAGE.size if at + _MESSAGE.size > len(data) else None

    def _copy(self, size: int) -> bytes:
        at = self.position % self._capacity
        fits = min(size, self._capacity - at)
        data = os.pread(self._file, fits, _BASE + at)
        if size > fits and len(data) == fits:
            data += os.pread(self._file, size - fits, _BASE)
        return data

    def _skip_unreadable(self, end: int) -> None:
        marks = self._read_marks()
        if marks is None or marks[0] > self.position:
            self._catch_up(marks[0] if marks else self.position)
        else:
            self._give_up(end)

    def _catch_up(self, oldest: int) -> None:
        if self.position < oldest:
            self.overtaken += oldest - self.position
            self.position = oldest

    def _give_up(self, end: int) -> None:
        """Skip to `end`: the start of the next message is unknown after a damaged one."""
        self.refused += 1
        self.position = end
