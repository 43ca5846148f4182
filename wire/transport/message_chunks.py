"""Long messages travel in parts of one ZeroMQ message.

CURVE copies each part several times on its way, into memory that it allocates each time. Beyond
malloc's threshold that memory comes from the system and goes back to it: zeroing its pages cost
more than the encryption. Parts below the threshold use the same memory again.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.wire.transport.decoding import FrameRefused, Reason

PART_BYTES = 96 << 10
"""Length of every part but the last. With CURVE's overhead it is below malloc's 128 KiB."""


def split(body: bytes) -> list[bytes | memoryview]:
    """The parts in which a message is sent. A short one is a single part."""
    if len(body) <= PART_BYTES:
        return [body]
    view = memoryview(body)
    return [view[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]


def join(parts: Sequence[bytes], *, max_bytes: int) -> bytes:
    """The message that was sent in these parts.

    A single part may be of any length; its receiver's decoder limits it.

    Args:
        parts: of one ZeroMQ message, without its routing id.
        max_bytes: the longest message that is put together.

    Raises:
        FrameRefused: `split` does not make such parts, or they are too long together.
    """
    if len(parts) == 1:
        return parts[0]
    if not parts or not 0 < len(parts[-1]) <= PART_BYTES:
        raise FrameRefused(Reason.PARTS, f"{len(parts)} parts instead of 1")
    if any(len(part) != PART_BYTES for part in parts[:-1]):
        raise FrameRefused(
            Reason.PARTS, f"{len(parts)} parts, which are not of {PART_BYTES} bytes each"
        )
    length = (len(parts) - 1) * PART_BYTES + len(parts[-1])
    if length > max_bytes:
        raise FrameRefused(Reason.TOO_LONG, f"{length} bytes; at most {max_bytes} are accepted")
    return b"".join(parts)
