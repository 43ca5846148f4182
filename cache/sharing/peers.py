"""The other members of an exchange: their ring files, found and read."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl.cache.errors import ExchangeRefused
from asyncrl.cache.sharing.ring import RingReader

SUFFIX = ".ring"
MAX_PEERS = 64
POLL_BYTES = 1 << 17
"""Read at once, about: 32,000 tokens, some 5 ms of insertion, so that no decode step waits long."""
LOOK_EVERY = 1.0
"""Seconds between looks into the directory for members that came or were replaced."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Peer:
    inode: int
    reader: RingReader


class Peers:
    """Reads the rings of all members but one.

    Args:
        directory: of the exchange.
        own: file name of this member's ring. While `own_inode` is -1, a file of that name is the
            ring of a former process, and is read like any other.
        receive: called with each message.
        clock: seconds, rising.
    """

    def __init__(
        self,
        directory: Path,
        own: str,
        receive: Callable[[bytes], None],
        clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._own = own
        self._own_inode = -1
        self._receive = receive
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._refused_files: dict[str, int] = {}  # inodes of files that are not rings: logged once
        self._next_look = 0.0
        self._turn = 0
        self._overtaken = self._refused = 0  # of readers that were closed

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def overtaken(self) -> int:
        """Counter: bytes that were overwritten before they were read."""
        return self._overtaken + sum(peer.reader.overtaken for peer in self._peers.values())

    @property
    def refused(self) -> int:
        """Counter: places in a ring that hold no valid message."""
        return self._refused + sum(peer.reader.refused for peer in self._peers.values())

    def own_ring_is_there(self) -> None:
        """From now on the file of this member's name is its own ring, and not read."""
        self._own_inode = self._members()[self._own]

    def due(self) -> bool:
        """Whether it is time to look into the directory again."""
        return self._clock() >= self._next_look

    def look(self) -> bool:
        """Find members that came, left or were replaced: a known name with a new inode.

        Returns:
            whether this member's own ring is still in the directory.
        """
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
            if found.get(name) != peer.inode:
                self._drain(name)
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
        """Close all rings and look for no others."""
        for name in list(self._peers):
            self._part(name)
        self._next_look = float("inf")

    def _take(self, name: str, limit: int) -> int:
        """Receive one peer's next messages; returns their bytes."""
        try:
            messages = self._peers[name].reader.read(limit)
        except OSError as error:
            _log.warning("%s cannot be read any more: %s", self._directory / name, error)
            self._part(name)
            return 0
        for message in messages:
            self._receive(message)
        return sum(map(len, messages))

    def _drain(self, name: str) -> None:
        """Receive the last messages of a ring that was removed or replaced, and close it."""
        self._take(name, POLL_BYTES)
        self._part(name)

    def _members(self) -> dict[str, int]:
        """Rings in the directory and their inodes."""
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
            except (OSError, ExchangeRefused) as error:
                why = error
            else:
                return
        self._refused_files[name] = inode
        _log.warning("%s is not read: %s", self._directory / name, why)

    def _part(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.reader.leave()
            self._overtaken += peer.reader.overtaken
            self._refused += peer.reader.refused


def make_private(directory: Path) -> None:
    """Make a directory that only this user can enter, or check that it is one.

    Raises:
        ExchangeRefused: it is a link, another user's, or open to others; or it cannot be made.
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
