"""One finished rollout as bytes, as generators send it to each other.

    key bytes 2 | head tokens 2 | tokens 4 | policy version 4 | key | tokens

All numbers are little-endian, tokens int32, head first. Nothing that is read is trusted.
"""

from __future__ import annotations

import struct

import numpy as np

from asyncrl.cache.config import MAX_MATCH_LIMIT
from asyncrl.cache.tree.stored import StoredRollouts, are_valid_tokens
from asyncrl.rollout.arrays import INT32_MAX
from asyncrl.rollout.trajectory import IntArray

_FIELDS = struct.Struct("<HHII")
_INT32 = np.dtype("<i4")


def pack(rollout: StoredRollouts, head: int) -> bytes | None:
    """The message of a single rollout whose head has `head` tokens; None if the key is too long."""
    key = rollout.key.encode("utf-8", "surrogatepass")
    if len(key) >= 1 << 16:
        return None
    fields = _FIELDS.pack(len(key), head, len(rollout.tokens), int(rollout.versions[0]))
    return fields + key + rollout.tokens.astype(_INT32).tobytes()


def parse(message: bytes, vocabulary: int) -> tuple[str, IntArray, IntArray, int] | None:
    """Key, context `[C]`, response `[R]` and policy version; None if it is not a valid message."""
    if len(message) < _FIELDS.size:
        return None
    key_size, head, count, version = _FIELDS.unpack_from(message)
    start = _FIELDS.size + key_size
    if start + 4 * count != len(message):
        return None
    if not 1 <= head <= MAX_MATCH_LIMIT or count <= head or version > INT32_MAX:
        return None
    try:
        key = message[_FIELDS.size : start].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    tokens = np.frombuffer(message, _INT32, offset=start).astype(np.int32)
    if not key or not are_valid_tokens(tokens[None, :head], tokens, vocabulary):
        return None
    context = tokens[:head]
    return key, context[context >= 0], tokens[head:], version
