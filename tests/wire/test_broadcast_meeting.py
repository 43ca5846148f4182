"""Who takes part in a broadcast, and when it begins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.wire.weights.broadcast.store import BroadcastMeeting, CheckIn

WINDOW = 2.0


def check_in(member: str, version: int, number: int = 1) -> CheckIn:
    return CheckIn(member, number, version, 0, "cpu")


def arrive(meeting: BroadcastMeeting, members: str, version: int, now: float = 0.0) -> None:
    assert not meeting.turn_away(version)
    for member in members:
        meeting.arrive(check_in(member, version), now)


def take(meeting: BroadcastMeeting, now: float) -> str:
    """The names of the members that take part now."""
    taken = meeting.take(now)
    meeting.served(taken)
    return "".join(one.member for one in taken)


def test_it_begins_when_as_many_have_come_as_the_first_version_is_for() -> None:
    meeting = BroadcastMeeting(WINDOW, 3)
    arrive(meeting, "ca", 1)
    assert take(meeting, 0.1) == ""
    arrive(meeting, "b", 1)
    assert take(meeting, 0.1) == "abc"


def test_it_begins_without_those_who_do_not_come_in_time() -> None:
    meeting = BroadcastMeeting(WINDOW, 3)
    arrive(meeting, "ab", 1, now=5.0)
    assert take(meeting, 5.0 + WINDOW - 0.01) == ""
    assert take(meeting, 5.0 + WINDOW) == "ab"
    arrive(meeting, "c", 1, now=9.0)  # a broadcast of its own, at once: all have come now
    assert take(meeting, 9.0) == "c"
    arrive(meeting, "ac", 2, now=20.0)
    assert take(meeting, 20.0) == ""  # b received the version before
    arrive(meeting, "bd", 2, now=20.5)
    assert take(meeting, 20.5) == "abcd"


def test_after_a_break_those_who_come_in_time_are_enough() -> None:
    meeting = BroadcastMeeting(WINDOW, 2)
    arrive(meeting, "ab", 1)
    meeting.broke(meeting.take(0.0))
    arrive(meeting, "a", 2, now=10.0)
    assert take(meeting, 10.0) == ""
    assert take(meeting, 10.0 + WINDOW) == "a"
    arrive(meeting, "a", 3, now=20.0)
    assert take(meeting, 20.0) == "a"  # b is no longer expected


def test_who_asks_for_another_version_than_the_newest_is_turned_away() -> None:
    meeting = BroadcastMeeting(WINDOW, 2)
    arrive(meeting, "a", 1)
    assert [one.member for one in meeting.turn_away(2)] == ["a"]
    assert take(meeting, 99.0) == ""


def test_a_member_that_asks_again_is_answered_once() -> None:
    meeting = BroadcastMeeting(WINDOW, 1)
    for number in (1, 2):
        meeting.arrive(check_in("a", 1, number), 0.0)
    meeting.turn_away(1)
    assert [one.number for one in meeting.take(0.0)] == [2]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.floats(0.0, 1.5), st.booleans(), st.booleans()),
        max_size=60,
    ),
    st.integers(1, 5),
)
def test_everybody_takes_part_once_and_waits_no_longer_than_the_window(
    events: list[tuple[str, float, bool, bool]], expected: int
) -> None:
    """Whatever comes when, and whatever breaks."""
    meeting, now, version = BroadcastMeeting(WINDOW, expected), 0.0, 0
    waiting: dict[str, tuple[int, float]] = {}
    for number, (member, pause, is_new, breaks) in enumerate(events):
        version += is_new
        meeting.arrive(check_in(member, version, number), now)
        waiting[member] = (number, now)
        for one in meeting.turn_away(version):
            assert one.policy_version != version
            assert waiting.pop(one.member)[0] == one.number
        taken = meeting.take(now)
        for one in taken:
            assert waiting.pop(one.member)[0] == one.number
        if taken:
            (meeting.broke if breaks else meeting.served)(taken)
        now += pause
        if taken := meeting.take(now):
            for one in taken:
                del waiting[one.member]
            meeting.served(taken)
        assert all(now < since + WINDOW for _, since in waiting.values())
