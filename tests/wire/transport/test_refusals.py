"""Refused frames: counted, logged at a bounded rate, and their senders cut off."""

from __future__ import annotations

import pytest
from fake_clock import FakeClock

from asyncrl.wire.transport.decoding import FrameRefused, Reason
from asyncrl.wire.transport.refusals import LIMIT, MAX_SENDERS, Refusals

NONSENSE = FrameRefused(Reason.MALFORMED, "it is no MessagePack")


class Noted:
    """Refusals whose hooks are noted."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.counted: list[Reason] = []
        self.cut_off: list[tuple[str, str]] = []
        self.refusals = Refusals(self.counted.append, clock=self.clock)
        self.refusals.on_cut_off = lambda *who: self.cut_off.append(who)


def test_a_peer_that_keeps_sending_nonsense_is_cut_off_once() -> None:
    noted = Noted()
    for _ in range(LIMIT.frames):
        noted.refusals.refuse("g", NONSENSE)
    assert not noted.refusals.is_cut_off("g")
    for _ in range(3):
        noted.refusals.refuse("g", NONSENSE)
    noted.refusals.drop("g")
    assert noted.refusals.is_cut_off("g")
    assert not noted.refusals.is_cut_off("other")
    ((name, why),) = noted.cut_off
    assert name == "g"
    assert why == (
        "sent 101 frames within 10 s that were refused, the last one because: it is no MessagePack"
    )
    assert noted.counted == [Reason.MALFORMED] * (LIMIT.frames + 3) + [Reason.CUT_OFF]


def test_a_few_refused_frames_now_and_then_are_forgiven() -> None:
    noted = Noted()
    for _ in range(10):
        for _ in range(LIMIT.frames // 2):
            noted.refusals.refuse("g", NONSENSE)
        noted.clock.now += LIMIT.seconds + 1
    assert not noted.refusals.is_cut_off("g")


def test_a_million_names_take_bounded_memory() -> None:
    noted = Noted()
    for index in range(5 * MAX_SENDERS):
        noted.refusals.refuse(f"name-{index}", NONSENSE)
    assert len(noted.refusals._senders) == MAX_SENDERS


def test_a_flood_writes_few_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    noted = Noted()
    for index in range(50):
        noted.refusals.refuse(f"name-{index}", FrameRefused(Reason.MALFORMED, "\n\x1b[2J" * 1000))
    noted.clock.now += 2
    noted.refusals.refuse("last", NONSENSE)
    first, second = caplog.messages
    assert len(first) < 1000
    assert "\n" not in first
    assert "\x1b" not in first
    assert second.endswith("it is no MessagePack (49 more since the last line)")
