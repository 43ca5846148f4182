"""Whatever relays lose, and in whatever order they hand over: each body comes once, in order."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.wire import RunKey
from asyncrl.wire.errors import SessionFull
from asyncrl.wire.sessions.peers import (
    EXTRA_BYTES,
    GATHER_SECONDS,
    MAX_BYTES,
    Gatherer,
    SessionPeers,
    bundles_of,
    entries_of,
    is_bundle,
)
from asyncrl.wire.sessions.session import (
    ACK_FRAMES,
    ACK_SECONDS,
    AGAIN,
    HEADER_BYTES,
    MAX_PATIENCE_SECONDS,
    PATIENCE_SECONDS,
    Limits,
    Session,
    header_of,
    is_urgent,
)
from asyncrl.wire.transport.decoding import FrameRefused, Reason
from asyncrl.wire.transport.refusals import Refusals

KEY = RunKey.new()
KEYS = KEY.hub("control")
CHILDREN = 2


class World:
    """Two children, relays that come and go, and the controller's ends. The test has the clock.

    Frames of one relay keep their order; those of two relays do not.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.refusals = Refusals()
        self.cut_off: list[str] = []
        self.refusals.on_cut_off = lambda peer, _why: self.cut_off.append(peer)
        self.peers = SessionPeers(KEYS, self.refusals, self._to_relay)
        self.children = [Session(bytes([n]) * 8) for n in range(CHILDREN)]
        self.identities = [KEYS.identity_of(f"generator-{n}") for n in range(CHILDREN)]
        self.relays = 1
        self.up: list[deque[tuple[int, bytes]]] = [deque()]
        self.down: list[deque[bytes]] = [deque()]
        self.sent_up: list[list[bytes]] = [[] for _ in self.children]
        self.sent_down: list[list[bytes]] = [[] for _ in self.children]
        self.got_up: list[list[bytes]] = [[] for _ in self.children]
        self.got_down: list[list[bytes]] = [[] for _ in self.children]

    def _to_relay(self, relay: str, bundle: bytes) -> None:
        self.down[int(relay.removeprefix("relay-0."))].append(bundle)

    def transmit(self, child: int, frames: list[bytes]) -> None:
        self.up[-1].extend((child, frame) for frame in frames)

    def child_sends(self, child: int) -> None:
        body = f"up {child} {len(self.sent_up[child])}".encode()
        self.sent_up[child].append(body)
        self.transmit(child, [self.children[child].send(body, self.now)])

    def controller_sends(self, child: int) -> None:
        if f"generator-{child}" in self.peers:
            body = f"down {child} {len(self.sent_down[child])}".encode()
            self.sent_down[child].append(body)
            self.peers.send(f"generator-{child}", body, self.now)
            self.peers.flush()

    def hand_up(self, relay: int, count: int) -> None:
        """A relay hands some frames to the controller, in one bundle."""
        queue = self.up[relay % self.relays]
        entries = []
        for _ in range(min(count, len(queue))):
            child, frame = queue.popleft()
            entries.append((self.identities[child], frame))
        for bundle in bundles_of(entries):
            for name, body in self.peers.take(f"relay-0.{relay % self.relays}", bundle, self.now):
                self.got_up[int(name.removeprefix("generator-"))].append(body)
            self.peers.flush()

    def hand_down(self, relay: int) -> None:
        """A relay hands a bundle of the controller to its children."""
        queue = self.down[relay % self.relays]
        if queue:
            for identity, frame in entries_of(queue.popleft()):
                child = self.identities.index(identity)
                taken = self.children[child].take(frame, self.now)
                self.transmit(child, taken.replies)
                if taken.body is not None:
                    self.got_down[child].append(taken.body)

    def lose(self, *, up: bool) -> None:
        """A connection of the present relay breaks: what is under way there is gone."""
        (self.up if up else self.down)[-1].clear()

    def replace_relay(self, *, late: bool) -> None:
        """Another relay; of what the last one had, some may still come late."""
        if not late:
            self.lose(up=True)
            self.lose(up=False)
        self.up.append(deque())
        self.down.append(deque())
        self.relays += 1

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for child, session in enumerate(self.children):
            self.transmit(child, session.due(self.now))
        self.peers.tick(self.now)
        self.peers.flush()

    def settle(self) -> None:
        """Nothing is lost any more: after a bounded time everything has come."""
        for child in range(CHILDREN):
            self.child_sends(child)  # a child reports twice a second
        for _ in range(80):
            for relay in range(self.relays):
                while self.up[relay]:
                    self.hand_up(relay, 3)
                while self.down[relay]:
                    self.hand_down(relay)
            self.wait(0.5)


actions = st.one_of(
    st.tuples(st.just("child_sends"), st.integers(0, CHILDREN - 1)),
    st.tuples(st.just("controller_sends"), st.integers(0, CHILDREN - 1)),
    st.tuples(st.just("hand_up"), st.integers(0, 5), st.integers(1, 4)),
    st.tuples(st.just("hand_down"), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.sampled_from([0.01, 0.15, 0.5, 3.0])),
    st.tuples(st.just("lose_up")),
    st.tuples(st.just("lose_down")),
    st.tuples(st.just("replace"), st.booleans()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(actions, max_size=80))
def test_each_body_comes_once_and_in_order(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    world = World()
    for name, *arguments in steps:
        if name == "lose_up":
            world.lose(up=True)
        elif name == "lose_down":
            world.lose(up=False)
        elif name == "replace":
            world.replace_relay(late=arguments[0])
        else:
            getattr(world, name)(*arguments)
        for child in range(CHILDREN):  # at any time: a part of what was sent, from the first on
            assert world.got_up[child] == world.sent_up[child][: len(world.got_up[child])]
            assert world.got_down[child] == world.sent_down[child][: len(world.got_down[child])]
    world.settle()
    assert world.got_up == world.sent_up
    assert world.got_down == world.sent_down
    assert not any(session.unacknowledged for session in world.children)
    assert not world.peers.active
    assert not world.cut_off


def test_a_quiet_session_costs_nothing() -> None:
    """After the last acknowledgement neither end sends anything."""
    world = World()
    for _ in range(5):
        world.child_sends(0)
    world.controller_sends(0)
    world.settle()
    for _ in range(100):
        world.wait(1.0)
    assert not any(world.up)
    assert not any(world.down)


def test_frames_are_acknowledged_in_time_and_together() -> None:
    ours, theirs = Session(b"s" * 8), Session(b"s" * 8)
    frames = [ours.send(b"x", 0.0) for _ in range(ACK_FRAMES)]
    for frame in frames[:-1]:
        assert not theirs.take(frame, 0.0).replies
    assert theirs.next_due == ACK_SECONDS
    (ack,) = theirs.take(frames[-1], 0.0).replies
    assert header_of(ack).ack == ACK_FRAMES
    assert len(ack) == HEADER_BYTES
    assert not ours.take(ack, 0.0).replies
    assert ours.unacknowledged == 0
    assert ours.next_due is None
    assert theirs.next_due is None


def test_what_came_through_a_relay_is_acknowledged_in_one_bundle() -> None:
    world = World()
    for child in range(CHILDREN):
        world.child_sends(child)
        world.hand_up(0, 1)
        world.now += ACK_SECONDS / 2
    world.wait(ACK_SECONDS / 2)  # due for the first child only
    assert len(world.down[0]) == 1
    world.hand_down(0)
    assert not any(session.unacknowledged for session in world.children)


def test_an_acknowledgement_travels_with_what_is_sent() -> None:
    ours, theirs = Session(b"s" * 8), Session(b"s" * 8)
    theirs.take(ours.send(b"x", 0.0), 0.0)
    answer = theirs.send(b"y", 0.05)
    assert ours.take(answer, 0.05).body == b"y"
    assert ours.unacknowledged == 0
    assert not theirs.due(ACK_SECONDS)


def test_a_session_that_is_not_answered_asks_ever_less_often() -> None:
    session = Session(b"s" * 8)
    session.send(b"x", 0.0)
    times, now = [], 0.0
    while now < 200:
        due = session.next_due
        assert due is not None
        now = due
        assert len(session.due(now)) == 1
        times.append(now)
    waits = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert waits[:3] == [PATIENCE_SECONDS, 2 * PATIENCE_SECONDS, 4 * PATIENCE_SECONDS]
    assert max(waits) == MAX_PATIENCE_SECONDS


def test_a_lost_end_comes_after_one_question() -> None:
    ours, theirs = Session(b"s" * 8), Session(b"s" * 8)
    bodies = [b"%d" % n for n in range(10)]
    for body in bodies:
        ours.send(body, 0.0)  # lost
    (probe,) = ours.due(PATIENCE_SECONDS)
    first = theirs.take(probe, PATIENCE_SECONDS)
    (question,) = first.replies
    again = ours.take(question, PATIENCE_SECONDS).replies
    taken = [theirs.take(frame, PATIENCE_SECONDS).body for frame in again]
    assert [first.body, *taken] == bodies


def test_what_is_not_acknowledged_is_bounded_and_the_bound_is_named() -> None:
    session = Session(b"s" * 8, Limits(frames=3, bytes=100))
    session.send(b"x" * 1000, 0.0)  # alone, it is kept however long
    with pytest.raises(SessionFull, match="1 frames of 1000 bytes"):
        session.send(b"y", 0.0)
    session.abandon()
    for _ in range(3):
        session.send(b"x", 0.0)
    with pytest.raises(SessionFull, match="3 frames of 3 bytes"):
        session.send(b"x", 0.0)


def test_a_frame_that_makes_no_sense_is_refused() -> None:
    session = Session(b"s" * 8)
    other = Session(b"t" * 8)
    for frame, reason in (
        (other.send(b"x", 0.0), Reason.UNEXPECTED),
        (b"short", Reason.MALFORMED),
        (session.send(b"x", 0.0)[:HEADER_BYTES], Reason.UNEXPECTED),
        (b"s" * 8 + bytes(16) + b"\x80", Reason.UNEXPECTED),
        (b"s" * 8 + bytes(8) + b"\x09" + bytes(7) + b"\x00", Reason.UNEXPECTED),
    ):
        with pytest.raises(FrameRefused) as refused:
            session.take(frame, 0.0)
        assert refused.value.reason is reason


def test_questions_are_answered_at_most_every_fifth_of_a_second() -> None:
    """A peer that asks without end is not sent everything without end."""
    ours, theirs = Session(b"s" * 8), Session(b"s" * 8)
    for _ in range(50):
        ours.send(b"x", 0.0)
    question = theirs.rerouted(0.0)[0]
    assert header_of(question).flags & AGAIN
    sent = sum(len(ours.take(question, 0.001 * n).replies) for n in range(1000))
    sent += len(ours.due(1.0))
    assert 50 * 3 <= sent <= 50 * 6


@given(
    st.lists(
        st.tuples(st.floats(0.0, 0.2), st.booleans(), st.integers(0, 3000)), min_size=1, max_size=60
    )
)
def test_a_relay_gathers_in_order_and_delays_little(frames: list[tuple[float, bool, int]]) -> None:
    gatherer, now = Gatherer(), 0.0
    came: list[tuple[bytes, float, bool]] = []
    gone: list[tuple[bytes, float]] = []
    departures: list[float] = []

    def leave_until(time: float) -> None:
        while (due := gatherer.due) is not None and due <= time:
            leaving = gatherer.leave(due)
            assert leaving
            departures.append(due)
            gone.extend((frame, due) for _, frame in leaving)

    for number, (wait, urgent, size) in enumerate(frames):
        leave_until(now + wait)
        now += wait
        frame = b"%d " % number + bytes(size)
        gatherer.add(b"peer", frame, now, urgent=urgent)
        came.append((frame, now, urgent))
        leave_until(now)
    leave_until(now + 1)
    assert gatherer.due is None
    assert [frame for frame, _ in gone] == [frame for frame, _, _ in came]
    for (_, at, urgent), (_, left) in zip(came, gone, strict=True):
        assert at <= left <= at + (0 if urgent else GATHER_SECONDS)
    if not any(urgent for _, urgent, _ in frames):
        waits = [after - before for before, after in pairwise(departures)]
        assert all(wait >= GATHER_SECONDS * 0.999 for wait in waits)


@given(st.lists(st.integers(0, MAX_BYTES * 2), max_size=12))
def test_bundles_hold_what_was_bundled(sizes: list[int]) -> None:
    entries = [(b"%d" % n, bytes(size)) for n, size in enumerate(sizes)]
    bundles = list(bundles_of(entries))
    assert [entry for bundle in bundles for entry in entries_of(bundle)] == entries
    for bundle in bundles:
        assert is_bundle(bundle)
        assert len(bundle) <= MAX_BYTES + EXTRA_BYTES or len(entries_of(bundle)) == 1
    for wrong in (
        b"\xc1",
        b"\xc1\x92\xc4\x00\xc4\x00",
        b"\xc1\x91\xc4\x00",
        b"\xc1" + b"\x91" * 9999,
    ):
        with pytest.raises(FrameRefused):
            entries_of(wrong)


def test_a_relay_speaks_for_nobody_whose_pass_it_does_not_know() -> None:
    world = World()
    own = KEYS.identity_of("generator-0")
    world.children[0].send(b"x", 0.0)
    forged = b"generator-1" + own[-16:]
    counted: list[Reason] = []
    world.refusals.count = counted.append
    frame = world.children[1].send(b"forged", 0.0)
    (bundle,) = bundles_of([(forged, frame), (b"", frame), (own[-16:], frame)])
    assert list(world.peers.take("relay-0.0", bundle, 0.0)) == []
    assert counted == [Reason.UNKNOWN_PEER] * 3
    assert "generator-1" not in world.peers


def test_a_late_frame_of_a_lost_relay_does_not_take_the_route_back() -> None:
    world = World()
    world.child_sends(0)
    world.hand_up(0, 9)
    world.child_sends(0)
    world.replace_relay(late=True)
    world.child_sends(0)
    world.hand_up(1, 9)
    assert world.peers._peers["generator-0"].relay == "relay-0.1"
    world.hand_up(0, 9)
    assert world.peers._peers["generator-0"].relay == "relay-0.1"


def test_urgency_is_read_without_decoding() -> None:
    session = Session(b"s" * 8)
    assert is_urgent(session.send(b"x", 0.0, urgent=True))
    assert not is_urgent(session.send(b"x", 0.0))
    assert is_urgent(b"")
