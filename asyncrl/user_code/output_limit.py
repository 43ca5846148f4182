"""How much of what reward functions print is logged. Import-light, no I/O, no clock."""

from __future__ import annotations

BURST_BYTES = 64 * 1024
"""A worker may log this much at once."""
BYTES_PER_SECOND = 1024
"""And this much on average: 84 MiB a day."""
TAIL_BYTES = 4 * 1024
"""The end of the output that error messages quote from, whether or not it was logged."""


class OutputLimit:
    """Decides which part of a worker's output is logged, and keeps the end of all of it.

    Example:
        >>> limit = OutputLimit(now=0.0)
        >>> limit.admit(b"x" * (BURST_BYTES + 10), now=0.0)[-1:]
        b'x'
        >>> limit.admit(b"more", now=0.0)
        b''
        >>> limit.admit(b"later", now=1.0).splitlines()[-1]
        b'later'
    """

    def __init__(self, now: float) -> None:
        self._budget = float(BURST_BYTES)
        self._now = now
        self.left_out = 0
        """Bytes left out since the last sentence that said so."""
        self.tail = b""
        """The last `TAIL_BYTES` bytes."""

    def admit(self, chunk: bytes, now: float) -> bytes:
        """What of a chunk is to be logged; a sentence comes before it if bytes were left out."""
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        grown = self._budget + (now - self._now) * BYTES_PER_SECOND
        self._budget, self._now = min(float(BURST_BYTES), grown), now
        if self._budget <= 0 or (self.left_out and self._budget < min(len(chunk), TAIL_BYTES)):
            self.left_out += len(chunk)
            return b""
        notice = self.notice()
        shown = chunk[: max(0, int(self._budget))]
        self._budget -= len(shown)
        self.left_out += len(chunk) - len(shown)
        return notice + shown

    def notice(self) -> bytes:
        """The sentence about what was left out since the last one; empty if nothing was."""
        left_out, self.left_out = self.left_out, 0
        if not left_out:
            return b""
        return (
            f"\n[asyncrl left out {left_out} bytes here: a reward worker may log "
            f"{BURST_BYTES // 1024} KiB at once and {BYTES_PER_SECOND // 1024} KiB a second]\n"
        ).encode()
