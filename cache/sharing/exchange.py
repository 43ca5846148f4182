"""Generators on one machine draft from each other's rollouts.

    generator A ── on close: its response ──► A.ring ──┐    (a directory of this user's, mode 0700)
    generator B ── on close: its response ──► B.ring ──┼──► each polls the others' and inserts
    generator C ── ...                                 ┘

Every process has a separate cache and exchanges insertions (docs/decisions/0005). The ring of a
killed process stays, and a starting process reads what is there. A failure here costs drafts, never
exactness.

A message is one finished rollout, little-endian, tokens int32, head first. It is validated.

    key bytes 2 | head tokens 2 | tokens 4 | policy version 4 | key | tokens
"""

import logging
import os
import re
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asyncrl.cache.config import MAX_MATCH_LIMIT, CacheConfig
from asyncrl.cache.sharing.ring import ExchangeRefused, RingReader, RingWriter
from asyncrl.cache.tree.arena import StoredRollouts, are_valid_tokens
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.rollout.jit import INT32_MAX
from asyncrl.rollout.trajectory import IntArray

SUFFIX = ".ring"
MAX_PEERS = 64
POLL_BYTES = 1 << 17
"""Bytes read at once, about: 32,000 tokens, some 5 ms, so no decode step waits long."""
LOOK_EVERY = 1.0
"""Seconds between scans of the directory for members that came or were replaced."""

_log = logging.getLogger(__name__)


class _Peer(NamedTuple):
    inode: int
    reader: RingReader


class Peers:
    """Reads the rings of all members of a directory but `own`, this member's file name.

    While `own_inode` is -1, a file of that name is the ring of a former process, and is read too.
    """

    def __init__(
        self,
        directory: Path,
        own: str,
        receive: Callable[[bytes], None],
        clock: Callable[[], float],
    ) -> None:
        self._directory, self._own, self._own_inode = directory, own, -1
        self._receive, self._clock = receive, clock
        self._peers: dict[str, _Peer] = {}
        self._refused_files: dict[str, int] = {}  # inodes of files that are not rings: logged once
        self._next_look = 0.0
        self._turn = 0

    def __len__(self) -> int:
        return len(self._peers)

    def own_ring_is_there(self) -> None:
        """Stop reading the file of this member's name, which is now its own ring."""
        self._own_inode = self._members()[self._own]

    def look(self) -> bool:
        """Find members that came, left or were replaced, if due; False if the own ring is gone."""
        if self._clock() < self._next_look:
            return True
        self._next_look = self._clock() + LOOK_EVERY
        try:
            found = self._members()
        except OSError as error:
            _log.warning("cannot list the members of the exchange %s: %s", self._directory, error)
            return True
        own_is_there = found.get(self._own) == self._own_inode
        if own_is_there:
            del found[self._own]
        for name, peer in list(self._peers.items()):
            if found.get(name) != peer.inode:  # removed or replaced
                self._take(name, POLL_BYTES)
                self._part(name)
        for name, inode in sorted(found.items()):
            if name not in self._peers and self._refused_files.get(name) != inode:
                self._join(name, inode)
        return own_is_there

    def take(self) -> None:
        """Receive about `POLL_BYTES` of messages from all peers."""
        limit = POLL_BYTES
        names = list(self._peers)
        for item in range(len(names)):
            if limit <= 0:
                break
            # Each call begins with another peer, so that a busy one does not starve the others.
            limit -= self._take(names[(self._turn + item) % len(names)], limit)
        self._turn += 1

    def take_former_own(self) -> None:
        """Receive all messages of this member's former ring."""
        if self._own in self._peers:
            while self._take(self._own, POLL_BYTES):
                pass
            self._part(self._own)

    def leave(self) -> None:
        """Close all rings and scan no more."""
        for name in list(self._peers):
            self._part(name)
        self._next_look = float("inf")

    def _take(self, name: str, limit: int) -> int:
        """Receive one peer's next messages; return their bytes."""
        try:
            messages = self._peers[name].reader.read(limit)
        except OSError as error:
            _log.warning("cannot read %s: %s; it is closed", self._directory / name, error)
            self._part(name)
            return 0
        for message in messages:
            self._receive(message)
        return sum(map(len, messages))

    def _members(self) -> dict[str, int]:
        """Return the rings in the directory and their inodes."""
        with os.scandir(self._directory) as entries:
            return {
                entry.name: entry.inode()
                for entry in entries
                if entry.name.endswith(SUFFIX) and not entry.name.startswith(".")
            }

    def _join(self, name: str, inode: int) -> None:
        if len(self._peers) >= MAX_PEERS:
            why: object = f"there are {MAX_PEERS} peers already"
        else:
            try:
                self._peers[name] = _Peer(inode, RingReader(self._directory / name))
                return
            except (OSError, ExchangeRefused) as error:
                why = error
        self._refused_files[name] = inode
        _log.warning("cannot read the rollouts in %s: %s", self._directory / name, why)

    def _part(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.reader.leave()


def make_private(directory: Path) -> None:
    """Make a directory that only this user can enter, or raise ExchangeRefused."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ExchangeRefused(f"cannot create the exchange {directory}: {error}") from error
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
        raise ExchangeRefused(
            f"the exchange {directory} must be a directory of user {os.geteuid()} with mode 0700, "
            f"not {stat.filemode(status.st_mode)} of user {status.st_uid}: other users who write "
            "there could slow this run down"
        )


_FIELDS = struct.Struct("<HHII")
_INT32 = np.dtype("<i4")


def pack(rollout: StoredRollouts, head: int) -> bytes | None:
    """Return the message of a rollout with a head of `head` tokens; None if the key is too long."""
    key = rollout.key.encode("utf-8", "surrogatepass")
    if len(key) >= 1 << 16:
        return None
    fields = _FIELDS.pack(len(key), head, len(rollout.tokens), int(rollout.versions[0]))
    return fields + key + rollout.tokens.astype(_INT32).tobytes()


def parse(message: bytes, vocabulary: int) -> tuple[str, IntArray, IntArray, int] | None:
    """Return key, context `[C]`, response `[R]` and policy version; None if it is invalid."""
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


RING_BYTES = 16 << 20
"""Size of each member's ring, allocated at once: about 4 million tokens, its most recent ones."""
POLL_EVERY = 32
"""Decode steps without a new request after which peers are polled nevertheless."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


class SharedCache(RolloutCache):
    """A `RolloutCache` that publishes its finished rollouts and inserts those of its peers.

    Rollouts of rows are published when the row is closed; those that `insert` adds are not.

    `directory` is made if it is missing (mode 0700); it must be this user's alone. `name` is unique
    among the running members; a member that restarts under its name finds what it had published.
    Token ids of peers from `vocabulary` on are refused. `clock` gives rising seconds. Raises
    ExchangeRefused if the directory is not safe or lacks room for the ring of `ring_bytes`,
    ValueError for an impossible name or capacity.
    """

    def __init__(
        self,
        config: CacheConfig,
        directory: Path,
        name: str,
        *,
        ring_bytes: int = RING_BYTES,
        vocabulary: int = INT32_MAX + 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config)
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"a member's name has 1 to 100 letters, digits, '.', '_' or '-', and does not "
                f"begin with '.' or '-', so not {name!r}"
            )
        self._file = directory / (name + SUFFIX)
        self._vocabulary = vocabulary
        self._ring: RingWriter | None = None
        self._steps = 0
        self.published_tokens = 0
        self.published_bytes = 0
        """Includes all framing."""
        self.unpublished_rollouts = 0
        """Not published: longer than a quarter of the ring, or the ring could not be written."""
        self.received_rollouts = self.received_tokens = 0
        self.invalid_rollouts = 0
        """Received messages that a member of this exchange would not have written."""
        make_private(directory)
        self.peers = Peers(directory, self._file.name, self._receive, clock)
        self.peers.look()
        self.peers.take_former_own()
        try:
            self._ring = RingWriter(self._file, ring_bytes)
        except OSError as error:
            raise ExchangeRefused(
                f"cannot create a ring of {ring_bytes} bytes in {directory}: {error}; "
                "name a directory with room, or do not share rollouts"
            ) from error
        self.peers.own_ring_is_there()

    def open(self, key: str, context: IntArray) -> int:
        """See `RolloutCache.open`; inserts what peers have published first."""
        self.poll()
        return super().open(key, context)

    def extend(self, rows: IntArray, tokens: IntArray, offsets: IntArray) -> None:
        """See `RolloutCache.extend`."""
        super().extend(rows, tokens, offsets)
        self._steps += 1
        if self._steps >= POLL_EVERY:
            self.poll()

    def close(self, row: int) -> None:
        """See `RolloutCache.close`; publishes what the row has stored."""
        rollout = self.stored_rollout(row)
        super().close(row)
        if rollout is not None:
            self._publish(rollout)

    def poll(self) -> int:
        """Insert some of what peers have published; return the number of response tokens."""
        self._steps = 0
        before = self.received_tokens
        if not self.peers.look() and self._ring is not None:
            _log.warning(
                "%s was removed or replaced (two members of one name?): this member publishes no "
                "more rollouts",
                self._file,
            )
            self._stop_publishing()
        self.peers.take()
        return self.received_tokens - before

    def leave(self) -> None:
        """Stop exchanging; the cache continues alone. The ring stays for the others."""
        self.peers.leave()
        self._stop_publishing()

    def _stop_publishing(self) -> None:
        if self._ring is not None:
            self._ring.leave()
            self._ring = None

    def _publish(self, rollout: StoredRollouts) -> None:
        message = pack(rollout, self.rules.max_match)
        size = 0
        if self._ring is not None and message is not None:
            try:
                size = self._ring.write(message)
            except OSError as error:
                _log.warning(
                    "cannot write %s: %s; no more rollouts are published", self._file, error
                )
                self._stop_publishing()
        self.published_bytes += size
        if size:
            self.published_tokens += len(rollout.tokens) - self.rules.max_match
        else:
            self.unpublished_rollouts += 1

    def _receive(self, message: bytes) -> None:
        """Insert the rollout of a message, if it is valid."""
        parsed = parse(message, self._vocabulary)
        if parsed is None:
            self.invalid_rollouts += 1
            return
        self.insert(*parsed)
        self.received_rollouts += 1
        self.received_tokens += len(parsed[2])
