r"""The controller's ends of sessions, the relay of each peer, and bundles of frames.

A peer's route is learned from the bundle in which its frame came. It changes only to relays that
were first heard of later, such as the replacement of a lost one. When it changes, both ends resend
what may be lost.

A relay carries the passes of its own node's children, and can speak for these only: without a pass
no frame in a bundle is read (`asyncrl.wire.transport.keys`).

A bundle is many frames of many sessions in one frame between a relay and the controller:

    b"\xc1" + MessagePack [[peer, frame], ...]

`peer` is the routing id of a child: its name and its pass, which the controller checks. MessagePack
never begins with 0xc1, so a bundle differs from a message.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from asyncrl.wire.sessions.session import Limits, Session, header_of
from asyncrl.wire.transport.decoding import FrameRefused, Reason
from asyncrl.wire.transport.keys import HubKeys
from asyncrl.wire.transport.refusals import NO_PASS, Refusals

GATHER_SECONDS = 0.05
"""Longest wait of a frame that is not urgent."""
MAX_FRAMES = 256
"""Number of frames that leave at once, however urgent."""
MAX_BYTES = 1 << 20
"""Most bytes of the frames in a bundle of several. A longer frame goes alone."""
EXTRA_BYTES = 4096
"""Bytes of a bundle of one frame, beyond its message: more than the headers need."""

_MARK = b"\xc1"
_FRAME_BYTES = 64

Entry = tuple[bytes, bytes]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Entry]).decode


def is_bundle(body: bytes) -> bool:
    """Return True if it is a bundle, not a message."""
    return body[:1] == _MARK


def bundles_of(entries: list[Entry]) -> Iterator[bytes]:
    """Yield the bundles in which frames travel, in their order."""
    first = size = 0
    for index, (_, frame) in enumerate(entries):
        length = len(frame) + _FRAME_BYTES
        if index > first and size + length > MAX_BYTES:
            yield _MARK + _encode(entries[first:index])
            first, size = index, 0
        size += length
    if first < len(entries):
        yield _MARK + _encode(entries[first:] if first else entries)


def entries_of(body: bytes) -> list[Entry]:
    """Return the frames of a bundle. Raises FrameRefused if it is not a bundle."""
    try:
        return _decode(memoryview(body)[1:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise FrameRefused(Reason.MALFORMED, f"not a bundle: {error}") from error


class Gatherer:
    """The frames that wait in a relay for the controller. No sockets, no clock."""

    def __init__(self) -> None:
        self._waiting: list[Entry] = []
        self._bytes = 0
        self._left = float("-inf")
        self._due: float | None = None

    def add(self, peer: bytes, frame: bytes, now: float, *, urgent: bool) -> None:
        """Take a frame of a child."""
        self._waiting.append((peer, frame))
        self._bytes += len(frame)
        if urgent or len(self._waiting) >= MAX_FRAMES or self._bytes >= MAX_BYTES:
            self._due = now
        elif self._due is None:
            self._due = max(now, self._left + GATHER_SECONDS)

    @property
    def waiting(self) -> int:
        """Number of frames that have not left."""
        return len(self._waiting)

    @property
    def due(self) -> float | None:
        """Time at which waiting frames must leave; None: nothing waits."""
        return self._due

    def leave(self, now: float) -> list[Entry]:
        """Return everything that waits, if any of it is due."""
        if self._due is None or now < self._due:
            return []
        leaving, self._waiting = self._waiting, []
        self._bytes, self._due, self._left = 0, None, now
        return leaving


LIMITS = Limits()
"""Limits of what a peer has not acknowledged. One that exceeds them is cut off."""


@dataclass(slots=True)
class _Peer:
    name: str
    identity: bytes
    session: Session
    relay: str
    since: int
    """That relay's place in the order in which relays were first heard of."""


class SessionPeers:
    """All sessions of a hub; `send` passes a bundle for a relay to the socket, or drops it."""

    def __init__(
        self, keys: HubKeys, refusals: Refusals, send: Callable[[str, bytes], object]
    ) -> None:
        self._keys = keys
        self._refusals = refusals
        self._send = send
        self._peers: dict[str, _Peer] = {}
        self._by_identity: dict[bytes, _Peer] = {}
        self._relays: dict[str, int] = {}
        self._leaving: dict[str, list[Entry]] = {}
        self._active: dict[str, _Peer] = {}
        self.count_resent: Callable[[int], None] = lambda _frames: None
        """Called with the number of frames that are sent again."""

    def __contains__(self, peer: str) -> bool:
        return peer in self._peers

    @property
    def active(self) -> bool:
        """True if `tick` has anything to do."""
        return bool(self._active)

    @property
    def unacknowledged(self) -> int:
        """Number of frames that peers may lack. Thread-safe."""
        return sum(peer.session.unacknowledged for peer in list(self._peers.values()))

    def take(self, relay: str, bundle: bytes, now: float) -> Iterator[tuple[str, bytes]]:
        """Yield the new contents of a bundle with their senders, in order. Raises FrameRefused."""
        since = self._relays.setdefault(relay, len(self._relays))
        for identity, frame in entries_of(bundle):
            peer = self._by_identity.get(identity)
            if peer is None:
                name = self._keys.name_in(identity)
                if name is None:
                    self._refusals.note(f"a peer of {relay}", NO_PASS)
                    continue
            else:
                name = peer.name
            if self._refusals.is_cut_off(name):
                self._refusals.drop(name)
                continue
            try:
                if peer is None:
                    peer = self._new(name, identity, frame, relay, since)
                taken = peer.session.take(frame, now)
            except FrameRefused as error:
                self._refusals.refuse(name, error)
                continue
            self._leave(peer, taken.replies)
            if since > peer.since:
                peer.relay, peer.since = relay, since
                self._leave(peer, peer.session.rerouted(now))
            self._active[name] = peer
            if taken.body is not None:
                yield name, taken.body

    def _new(self, name: str, identity: bytes, frame: bytes, relay: str, since: int) -> _Peer:
        session = Session(header_of(frame).session, LIMITS)
        session.count_resent = lambda frames: self.count_resent(frames)
        peer = _Peer(name, identity, session, relay, since)
        self._peers[name] = self._by_identity[identity] = peer
        return peer

    def send(self, peer: str, body: bytes, now: float) -> None:
        """Send to a peer with the next `flush`. Raises SessionFull if it acknowledges nothing."""
        known = self._peers[peer]
        self._leave(known, [known.session.send(body, now)])
        self._active[peer] = known

    def tick(self, now: float) -> None:
        """Acknowledge, ask and send again if it is time; acknowledge all of a relay at once."""
        relays: set[str] = set()
        for name, peer in list(self._active.items()):
            due = peer.session.next_due
            if due is None:
                del self._active[name]
            elif now >= due:
                relays.add(peer.relay)
        for peer in self._active.values() if relays else ():
            if peer.relay in relays:
                self._leave(peer, peer.session.due(now, leaves=True))

    def abandon(self, peer: str) -> None:
        """Forget what a lost peer did not acknowledge. What it has sent may still come."""
        known = self._peers.get(peer)
        if known is not None:
            known.session.abandon()

    def _leave(self, peer: _Peer, frames: list[bytes]) -> None:
        if frames:
            leaving = self._leaving.setdefault(peer.relay, [])
            leaving.extend((peer.identity, frame) for frame in frames)

    @property
    def leaving(self) -> bool:
        """True if `flush` would send anything."""
        return bool(self._leaving)

    def flush(self) -> None:
        """Send what leaves, in one bundle for each relay."""
        leaving, self._leaving = self._leaving, {}
        for relay, entries in leaving.items():
            for bundle in bundles_of(entries):
                self._send(relay, bundle)
