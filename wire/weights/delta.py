"""The exact difference between two versions of the same bytes.

One optimizer step at a small learning rate moves few weights by enough to change their 16 bits. A
delta lists the words that changed, and for each the XOR of its bits:

    byte 0      bytes of a word: 2 (bfloat16, float16) or 4 (float32)
    then, for each changed word in ascending order
      gap       words between the previous changed word and this one
      change    old XOR new, never 0

both as LEB128: seven bits a byte, the lowest first, the top bit set on all bytes but the last.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.jit import kernels_of
from asyncrl.wire.transport.decoding import FrameRefused, Reason

kernel = kernels_of("wire/weights")


Buffer = bytes | bytearray | memoryview | NDArray[np.uint8]
Words = NDArray[np.uint16] | NDArray[np.uint32]
_WORDS: Final[dict[int, Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
_LONGEST: Final = 10
"""Most bytes of one changed word: two LEB128 numbers of 32 bits."""
_BLOCK: Final = 4096
"""Words whose changes are found before the first one is written."""


def encode(new: Buffer, old: Buffer, word_bytes: int) -> bytes | None:
    """Return the delta from `old` to `new`; None if it would not be shorter than `new`.

    Both have the same length, a multiple of 4 bytes; `word_bytes` is 2 or 4.
    """
    words = _WORDS[word_bytes]
    one, other = np.frombuffer(new, words), np.frombuffer(old, words)
    if len(one) != len(other):
        raise ValueError(f"{one.nbytes} bytes cannot be a change of {other.nbytes}")
    body = np.empty(one.nbytes, np.uint8)
    body[:1] = word_bytes
    length = _encode(one, other, np.empty(_BLOCK, np.int64), body)
    return body[:length].tobytes() if 0 < length < one.nbytes else None


def apply(target: NDArray[np.uint8], body: Buffer) -> None:
    """Apply a delta to the bytes in `target`; they may have changed if it raises FrameRefused."""
    changes = np.frombuffer(body, np.uint8)
    words = _WORDS.get(int(changes[0])) if len(changes) else None
    if words is None or len(target) % 4 or not _apply(np.frombuffer(target, words), changes):
        raise FrameRefused(
            Reason.MALFORMED, f"{len(changes)} bytes are not a delta of {len(target)} bytes"
        )


def warm_up() -> None:
    """Compile or load the kernels: at first use, peers would wait for seconds."""
    for word_bytes in _WORDS:
        body = encode(bytes(63) + b"\1", bytes(64), word_bytes)
        if body is not None:
            apply(np.zeros(64, np.uint8), body)


@kernel.released
def _encode(new: Words, old: Words, changed: NDArray[np.int64], body: NDArray[np.uint8]) -> int:
    """Write the delta after byte 0 of `body`; return its length, or -1 if it does not fit."""
    end, after = 1, 0
    for start in range(0, len(new), len(changed)):
        count = 0
        for i in range(start, min(start + len(changed), len(new))):
            changed[count] = i  # without a branch that the processor would have to predict
            count += 1 if new[i] != old[i] else 0
        if end + count * _LONGEST > len(body):
            return -1
        for at in range(count):
            i = changed[at]
            gap, change = i - after, int(new[i] ^ old[i])
            after = i + 1
            if gap < 128 and change < 128:
                body[end], body[end + 1] = gap, change
                end += 2
            else:
                end = _put(body, _put(body, end, gap), change)
    return end


@kernel.released
def _put(body: NDArray[np.uint8], end: int, value: int) -> int:
    """Append a number; return its end."""
    while value >= 128:
        body[end] = (value & 127) | 128
        value >>= 7
        end += 1
    body[end] = value
    return end + 1


@kernel.released
def _apply(words: Words, body: NDArray[np.uint8]) -> bool:
    """Change the words in place; False, with some changed, if `body` is not their delta."""
    largest = (1 << (8 * words.itemsize)) - 1
    place, position = 1, -1
    while place < len(body):
        gap, place = _take(body, place)
        if gap < 0 or place >= len(body):
            return False
        change, place = _take(body, place)
        position += gap + 1
        if position >= len(words) or change <= 0 or change > largest:
            return False
        words[position] ^= change
    return True


@kernel.released
def _take(body: NDArray[np.uint8], place: int) -> tuple[int, int]:
    """Return the number at a place and its end; -1 if it is truncated or longer than 32 bits."""
    value = 0
    for shift in range(0, 35, 7):
        if place >= len(body):
            return -1, place
        byte = int(body[place])
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return (value if value < 1 << 32 else -1), place
    return -1, place
