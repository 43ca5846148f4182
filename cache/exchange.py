"""Generators on one machine draft from each other's rollouts.

    generator A ── on close: its response ──► A.ring ──┐    (a directory of this user's, mode 0700)
    generator B ── on close: its response ──► B.ring ──┼──► each polls the others' and inserts
    generator C ── ...                                 ┘

Every process has a cache of its own and exchanges insertions (docs/decisions/0005 says why not one
cache in shared memory). A process that dies takes nothing with it: its ring stays, and one that
starts reads what is there, its own former ring too. Nothing that is read is trusted, and whatever
goes wrong costs drafts, never exactness.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cache.config import MAX_MATCH_LIMIT, CacheConfig
from cache.errors import ExchangeRefused
from cache.ring import RingReader, RingWriter
from cache.stored import StoredRollouts, are_valid_tokens
from cache.tree import CacheStats, Drafts, RolloutCache
from rollout.arrays import INT32_MAX
from rollout.trajectory import IntArray

SUFFIX = ".ring"
RING_BYTES = 16 << 20
"""Of each member, allocated at once: about 4 million tokens, its most recent ones."""
MOST_PEERS = 64
POLL_BYTES = 1 << 17
"""Read at once, about: 32,000 tokens, some 5 ms of insertion, so that no decode step waits long."""
POLL_EVERY = 32
"""Steps without a new request after which peers are polled all the same."""
LOOK_EVERY = 1.0
"""Seconds between looks into the directory for members that came or were replaced."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_CONTENT = struct.Struct("<HHII")
"""Bytes of the key, tokens of the head, tokens in all, policy version."""
_WIRE = np.dtype("<i4")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExchangeStats:
    """Counters since start, but for `peers`."""

    peers: int
    """Members whose rings are read now."""
    published_rollouts: int
    published_tokens: int
    published_bytes: int
    """With all framing; divided by the tokens: what a token costs on the wire."""
    unpublished_rollouts: int
    """Longer than a quarter of the ring, or it could not be written."""
    received_rollouts: int
    received_tokens: int
    overtaken_bytes: int
    """Overwritten by their writers before they were read here."""
    refused: int
    """Messages, or places in a ring, that no member of this exchange would have written."""


@dataclass(slots=True)
class _Peer:
    inode: int
    reader: RingReader


class SharedCache:
    """A `RolloutCache` that tells others what it stored and takes what they stored.

    It has the methods of `RolloutCache` that engines use, and like it is for one thread.

    Args:
        cache: where everything is kept. What is in it already, and what `insert` adds, is not
            published: only what rows write.
        directory: made when it is missing (mode 0700); of this user's alone.
        name: of this member, no other living one may have it. A member that starts again under
            its name finds what it had published.
        ring_bytes: capacity of this member's ring.
        vocabulary: peers' tokens that are not below it are refused.
        clock: seconds, rising.

    Raises:
        ExchangeRefused: the directory is not safe, or there is no room for the ring in it.
        ValueError: an impossible name or capacity.
    """

    def __init__(
        self,
        cache: RolloutCache,
        directory: Path,
        name: str,
        *,
        ring_bytes: int = RING_BYTES,
        vocabulary: int = INT32_MAX + 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"a member's name has 1 to 100 letters, digits, '.', '_' or '-', and does not "
                f"begin with '.' or '-', so not {name!r}"
            )
        self.cache = cache
        self._directory = directory
        self._file = name + SUFFIX
        self._vocabulary = vocabulary
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._strange: dict[str, int] = {}  # inodes of files that are no rings: said once
        self._ring: RingWriter | None = None
        self._own_inode = -1
        self._next_look = 0.0
        self._steps = self._turn = 0
        self._published = self._tokens_out = self._bytes_out = self._unpublished = 0
        self._received = self._tokens_in = 0
        self._overtaken = self._refused = 0  # of readers that are gone
        make_private(directory)
        self._look()
        if self._file in self._peers:
            while self._take(self._file, POLL_BYTES):
                pass
            self._part(self._file)
        try:
            self._ring = RingWriter(directory / self._file, ring_bytes)
        except OSError as error:
            raise ExchangeRefused(
                f"no ring of {ring_bytes} bytes can be made in {directory}: {error}; "
                "name a directory with room, or share nothing"
            ) from error
        self._own_inode = self._members()[self._file]

    @property
    def config(self) -> CacheConfig:
        """Of the cache inside."""
        return self.cache.config

    def open(self, key: str, context: IntArray, **kwargs: Any) -> int:
        """As `RolloutCache.open`; takes in what peers have published since."""
        self.poll()
        return self.cache.open(key, context, **kwargs)

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray, **kwargs: Any) -> None:
        """As `RolloutCache.extend`."""
        self.cache.extend(rows, tokens, offsets, **kwargs)
        self._steps += 1
        if self._steps >= POLL_EVERY:
            self.poll()

    def draft(self, rows: IntArray, budgets: IntArray, **kwargs: Any) -> Drafts:
        """As `RolloutCache.draft`."""
        return self.cache.draft(rows, budgets, **kwargs)

    def close(self, row: int) -> None:
        """As `RolloutCache.close`; publishes what the row has stored."""
        written = self.cache.written(row)
        self.cache.close(row)
        if written is not None:
            self._publish(written)

    def advance(self, policy_version: int) -> None:
        """As `RolloutCache.advance`; rollouts travel with the version that wrote their end."""
        self.cache.advance(policy_version)

    def insert(
        self, key: str, context: IntArray, tokens: IntArray, policy_version: int | None = None
    ) -> None:
        """As `RolloutCache.insert`; not published."""
        self.cache.insert(key, context, tokens, policy_version)

    def stats(self) -> CacheStats:
        """Of the cache inside; what came from peers counts as inserted."""
        return self.cache.stats()

    def check(self) -> None:
        """As `RolloutCache.check`."""
        self.cache.check()

    def exchange_stats(self) -> ExchangeStats:
        """What went out and came in."""
        readers = [peer.reader for peer in self._peers.values()]
        return ExchangeStats(
            peers=len(readers),
            published_rollouts=self._published,
            published_tokens=self._tokens_out,
            published_bytes=self._bytes_out,
            unpublished_rollouts=self._unpublished,
            received_rollouts=self._received,
            received_tokens=self._tokens_in,
            overtaken_bytes=self._overtaken + sum(reader.overtaken for reader in readers),
            refused=self._refused + sum(reader.refused for reader in readers),
        )

    def poll(self) -> int:
        """Take in what peers have published, about `POLL_BYTES` of it; returns response tokens."""
        self._steps = 0
        if self._clock() >= self._next_look:
            self._look()
        before = self._tokens_in
        left = POLL_BYTES
        names = list(self._peers)
        for item in range(len(names)):
            if left <= 0:
                break
            # Begin with another one each time: one busy peer must not hide the rest.
            left -= self._take(names[(self._turn + item) % len(names)], left)
        self._turn += 1
        return self._tokens_in - before

    def leave(self) -> None:
        """Stop exchanging; the cache goes on alone. The ring stays for the others."""
        for name in list(self._peers):
            self._part(name)
        if self._ring is not None:
            self._ring.leave()
            self._ring = None
        self._next_look = float("inf")

    def _publish(self, stored: StoredRollouts) -> None:
        head, count = self.config.max_match, len(stored.tokens)
        name = stored.key.encode("utf-8", "surrogatepass")
        written = False
        if self._ring is not None and len(name) < 1 << 16:
            content = _CONTENT.pack(len(name), head, count, int(stored.versions[0])) + name
            content += stored.tokens.astype(_WIRE).tobytes()
            try:
                size = self._ring.write(content)
            except OSError as error:
                _log.warning("%s is not written any more: %s", self._file, error)
                self._ring.leave()
                self._ring = None
            else:
                written = size > 0
                self._bytes_out += size
        if written:
            self._published += 1
            self._tokens_out += count - head
        else:
            self._unpublished += 1

    def _take(self, name: str, limit: int) -> int:
        """Insert one peer's next messages; returns their bytes."""
        peer = self._peers[name]
        try:
            messages = peer.reader.read(limit)
        except OSError as error:
            _log.warning("%s is not read any more: %s", self._directory / name, error)
            self._part(name)
            return 0
        for message in messages:
            self._receive(message)
        return sum(map(len, messages))

    def _receive(self, message: bytes) -> None:
        """Insert a rollout, if it is one."""
        parsed = parse(message, self._vocabulary)
        if parsed is None:
            self._refused += 1
            return
        self.cache.insert(*parsed)
        self._received += 1
        self._tokens_in += len(parsed[2])

    def _look(self) -> None:
        """See which members there are; a known name with a new inode is a new ring."""
        self._next_look = self._clock() + LOOK_EVERY
        try:
            found = self._members()
        except OSError as error:
            _log.warning("the exchange in %s cannot be looked at: %s", self._directory, error)
            return
        if found.get(self._file) == self._own_inode:
            del found[self._file]
        elif self._ring is not None:
            _log.warning(
                "%s was removed or replaced: two members of one name? Rollouts of this one are "
                "not published any more",
                self._directory / self._file,
            )
            self._ring.leave()
            self._ring = None
        for name, peer in list(self._peers.items()):
            if found.get(name) != peer.inode:
                self._take(name, POLL_BYTES)
                self._part(name)
        for name, inode in sorted(found.items()):
            if name not in self._peers and self._strange.get(name) != inode:
                self._join(name, inode)

    def _members(self) -> dict[str, int]:
        """Rings in the directory and their inodes."""
        with os.scandir(self._directory) as entries:
            return {
                entry.name: entry.inode()
                for entry in entries
                if entry.name.endswith(SUFFIX) and not entry.name.startswith(".")
            }

    def _join(self, name: str, inode: int) -> None:
        if len(self._peers) >= MOST_PEERS:
            why: object = f"there are {MOST_PEERS} peers already"
        else:
            try:
                self._peers[name] = _Peer(inode, RingReader(self._directory / name))
            except (OSError, ExchangeRefused) as error:
                why = error
            else:
                return
        self._strange[name] = inode
        _log.warning("%s is not read: %s", self._directory / name, why)

    def _part(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.reader.leave()
            self._overtaken += peer.reader.overtaken
            self._refused += peer.reader.refused


def open_cache(
    config: CacheConfig,
    *,
    exchange: Path | None,
    name: str,
    vocabulary: int = INT32_MAX + 1,
) -> RolloutCache | SharedCache:
    """What an engine drafts from.

    Args:
        config: budgets and drafting rules; a disabled cache shares nothing.
        exchange: directory through which the generators of one machine share; None: alone.
        name: of this generator.
        vocabulary: peers' tokens that are not below it are refused.

    Raises:
        ExchangeRefused, ValueError: see `SharedCache`.
    """
    cache = RolloutCache(config)
    if exchange is None or not config.enabled:
        return cache
    return SharedCache(cache, exchange, name, vocabulary=vocabulary)


def make_private(directory: Path) -> None:
    """Make a directory that only this user can enter, or see that it is one.

    Raises:
        ExchangeRefused: it is a link, another user's, or open to others; or cannot be made.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ExchangeRefused(f"the exchange {directory} cannot be made: {error}") from error
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
        raise ExchangeRefused(
            f"the exchange {directory} must be a directory of user {os.geteuid()} with mode 0700, "
            f"not {stat.filemode(status.st_mode)} of user {status.st_uid}: whoever can write there "
            "can slow this run down"
        )


def parse(message: bytes, vocabulary: int) -> tuple[str, IntArray, IntArray, int] | None:
    """A rollout's key, context `[C]`, response `[R]` and policy version; None when it is none."""
    if len(message) < _CONTENT.size:
        return None
    name, head, count, version = _CONTENT.unpack_from(message)
    start = _CONTENT.size + name
    if start + 4 * count != len(message):
        return None
    if not 1 <= head <= MAX_MATCH_LIMIT or count <= head or version > INT32_MAX:
        return None
    try:
        key = message[_CONTENT.size : start].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    tokens = np.frombuffer(message, _WIRE, offset=start).astype(np.int32)
    if not key or not are_valid_tokens(tokens[None, :head], tokens, vocabulary):
        return None
    context = tokens[:head]
    return key, context[context >= 0], tokens[head:], version
