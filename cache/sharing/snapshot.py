"""The cache on disk, so that a restarted run drafts from its first step.

    save(cache, path, "Qwen3-0.6B vocabulary 151936")
    restore(path, cache, "Qwen3-0.6B vocabulary 151936")

The file contains finished rollouts, not the arena, so it does not depend on the memory layout, nor
on the budgets and match lengths of the process that loads it.

    header       magic 8 | format 4 | fingerprint bytes 4 | head 4 | prompts 4 | body bytes 8 |
                 digest 32 (BLAKE2b of the rest of the file)
    fingerprint  model and tokenizer of the tokens
    prompt       key bytes 4 | rollouts 4 | tokens 8 | key | length of each rollout |
                 policy version of each | tokens
    ...          least recently used prompt first, its oldest rollout first

All numbers are little-endian, tokens int32. A rollout begins with its head: the `head` tokens
before the response, -1 if there were fewer. Every number is checked before it is used, and no array
is allocated that the file is too short to fill.
"""

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from asyncrl.cache.config import MAX_MATCH_LIMIT
from asyncrl.cache.tree.arena import StoredRollouts, are_valid_tokens
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.rollout.jit import INT32_MAX
from asyncrl.rollout.trajectory import IntArray
from asyncrl.wire.transport.atomic_files import replacing

MAGIC = b"rollouts"
FORMAT = 1
MAX_FINGERPRINT_BYTES = 4096

_FIELDS = struct.Struct("<8sIIIIQ")
_DIGEST = 32
_HEADER = _FIELDS.size + _DIGEST
_PROMPT = struct.Struct("<IIQ")
_CHUNK = 1 << 20
_INT32 = np.dtype("<i4")


class SnapshotRefused(Exception):  # noqa: N818 - named for what was decided
    """A snapshot was not loaded; the message says which file is wrong, how, and what to do."""


def save(cache: RolloutCache, path: str | os.PathLike[str], fingerprint: str) -> int:
    """Save the finished rollouts; a crash leaves the old file or the new one, never a mixture.

    No other thread may use the cache during this. The file is readable by its owner only.
    `fingerprint` identifies the meaning of token ids: model, tokenizer, vocabulary. Returns the
    bytes written. Raises ValueError for an empty fingerprint or one longer than
    `MAX_FINGERPRINT_BYTES` bytes; OSError if the file cannot be written.
    """
    mark = _fingerprint_bytes(fingerprint)
    with replacing(Path(path), mode=0o600) as file:
        return _write(file, cache, mark)


def restore(
    path: str | os.PathLike[str],
    cache: RolloutCache,
    fingerprint: str,
    *,
    vocabulary: int = INT32_MAX + 1,
) -> int:
    """Insert the rollouts of a snapshot into an empty cache with any budgets.

    If they do not fit, the least recently used prompts and the oldest rollouts are dropped.
    Rollouts keep their policy versions; the current one is not changed. `fingerprint` must equal
    the saved one; token ids from `vocabulary` on are refused. Returns the response tokens read,
    which count as inserted in the cache's stats.

    Raises SnapshotRefused for another format or fingerprint, or a damaged file; if a file with a
    correct digest is inconsistent, the cache contains the prompts before the inconsistency. Raises
    ValueError for a cache that is not empty, or an empty or too long fingerprint; OSError for a
    file that cannot be read.
    """
    mark = _fingerprint_bytes(fingerprint)
    if cache.stats().sequences:
        raise ValueError(
            "a snapshot can only be restored into an empty cache; this one has rollouts"
        )
    with Path(path).open("rb") as file:
        reader = _Reader(file, str(path), os.fstat(file.fileno()).st_size)
        found, head, prompts = reader.verified_header()
        if found != mark:
            raise SnapshotRefused(
                f"snapshot {path} has the fingerprint {found.decode(errors='replace')!r}, this run "
                f"has {fingerprint!r}: load one that was saved with the same model and tokenizer"
            )
        total = 0
        for stored in reader.rollouts(head, prompts, vocabulary):
            parts = np.split(stored.tokens, np.cumsum(stored.lengths[:-1]))
            for part, version in zip(parts, stored.versions.tolist(), strict=True):
                context, response = part[:head], part[head:]
                cache.insert(stored.key, context[context >= 0], response, version)
                total += len(response)
    return total


class _Reader:
    """Reads one open snapshot; every refusal names the file and the reason."""

    def __init__(self, file: BinaryIO, path: str, size: int) -> None:
        self._file, self._path, self._size = file, path, size
        self._left = 0

    def verified_header(self) -> tuple[bytes, int, int]:
        """Check format, length and digest; return fingerprint, tokens of a head, and prompts."""
        start = self._file.read(_HEADER)
        if len(start) < _HEADER or not start.startswith(MAGIC):
            raise self._refused("it is not a snapshot of rollouts")
        fields = start[: _FIELDS.size]
        _, version, mark_size, head, prompts, body = _FIELDS.unpack(fields)
        if version != FORMAT:
            raise self._refused(
                f"it has format {version}, this version of asyncrl reads format {FORMAT}"
            )
        if _HEADER + mark_size + body != self._size:
            raise self._refused(
                f"its header implies {_HEADER + mark_size + body} bytes, the file has "
                f"{self._size}: it was truncated, or something was appended"
            )
        digest = hashlib.blake2b(digest_size=_DIGEST)
        left = self._size - _HEADER  # a file that grows during this must not prolong it
        while left > 0 and (chunk := self._file.read(min(left, _CHUNK))):
            digest.update(chunk)
            left -= len(chunk)
        digest.update(fields)  # last, because the writer knows them last
        if digest.digest() != start[_FIELDS.size :]:
            raise self._refused("its digest does not match its content: it was damaged")
        if mark_size > MAX_FINGERPRINT_BYTES or not 1 <= head <= MAX_MATCH_LIMIT:
            raise self._inconsistent(f"a fingerprint of {mark_size} bytes, heads of {head}")
        self._file.seek(_HEADER)
        mark = self._file.read(mark_size)
        self._left = body
        return mark, head, prompts

    def rollouts(self, head: int, prompts: int, vocabulary: int) -> Iterator[StoredRollouts]:
        """Yield the rollouts, prompt by prompt, with all numbers checked."""
        for prompt in range(prompts):
            key_size, count, total = _PROMPT.unpack(self._take(_PROMPT.size, prompt))
            try:
                key = self._take(key_size, prompt).decode("utf-8", "surrogatepass")
            except UnicodeDecodeError as error:
                raise self._inconsistent(f"prompt {prompt}: its key is not UTF-8") from error
            lengths, versions = (self._numbers(count, prompt) for _ in range(2))
            tokens = self._numbers(total, prompt)
            if not key or not count or lengths.min() <= head:
                raise self._inconsistent(f"prompt {prompt}: no key, or a rollout without tokens")
            if int(lengths.sum(dtype=np.int64)) != total:
                raise self._inconsistent(f"prompt {prompt}: lengths do not add up to {total}")
            if versions.min() < 0:
                raise self._inconsistent(f"prompt {prompt}: a policy version is negative")
            starts = np.cumsum(lengths, dtype=np.int64) - lengths
            heads = tokens[starts[:, None] + np.arange(head)]
            if not are_valid_tokens(heads, tokens, vocabulary):
                raise self._inconsistent(
                    f"prompt {prompt}: a token is negative or not below {vocabulary}"
                )
            yield StoredRollouts(key, lengths, versions, tokens)
        if self._left:
            raise self._inconsistent(f"{self._left} bytes follow the last prompt")

    def _numbers(self, count: int, prompt: int) -> IntArray:
        return np.frombuffer(self._take(count * 4, prompt), _INT32).astype(np.int32)

    def _take(self, size: int, prompt: int) -> bytes:
        if size > self._left:
            raise self._inconsistent(
                f"prompt {prompt} needs {size} bytes, and {self._left} are left"
            )
        self._left -= size
        data = self._file.read(size)
        if len(data) != size:
            raise self._refused("it was truncated while it was read")
        return data

    def _refused(self, why: str) -> SnapshotRefused:
        return SnapshotRefused(
            f"snapshot {self._path} is refused: {why}. Delete it or save a new one; an empty cache "
            "is just as exact, only slower at first"
        )

    def _inconsistent(self, what: str) -> SnapshotRefused:
        return self._refused(f"it is inconsistent ({what})")


def _write(file: BinaryIO, cache: RolloutCache, mark: bytes) -> int:
    """Write everything; the header last, at the start of the file. Return the bytes."""
    digest = hashlib.blake2b(digest_size=_DIGEST)
    file.write(bytes(_HEADER))
    prompts = body = 0

    def put(data: bytes) -> int:
        digest.update(data)
        return file.write(data)

    put(mark)
    for stored in cache.finished_rollouts():
        name = stored.key.encode("utf-8", "surrogatepass")
        body += put(_PROMPT.pack(len(name), len(stored.lengths), len(stored.tokens)) + name)
        for numbers in (stored.lengths, stored.versions, stored.tokens):
            body += put(numbers.astype(_INT32).tobytes())
        prompts += 1
    fields = _FIELDS.pack(MAGIC, FORMAT, len(mark), cache.rules.max_match, prompts, body)
    digest.update(fields)
    file.seek(0)
    file.write(fields + digest.digest())
    return _HEADER + len(mark) + body


def _fingerprint_bytes(fingerprint: str) -> bytes:
    mark = fingerprint.encode("utf-8", "surrogatepass")
    if not 0 < len(mark) <= MAX_FINGERPRINT_BYTES:
        raise ValueError(
            f"a fingerprint identifies model, tokenizer and vocabulary in 1 to "
            f"{MAX_FINGERPRINT_BYTES} bytes, not {len(mark)}"
        )
    return mark
