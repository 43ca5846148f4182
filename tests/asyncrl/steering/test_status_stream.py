"""Many watchers cost one view per interval; those that are gone, full or silent cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec
import pytest
from fake_clock import FakeClock

from asyncrl.steering import status_stream as audience_module
from asyncrl.steering.status_stream import MAX_WATCHERS, VIEW_SECONDS, Audience, EncodedOnce
from asyncrl.wire.messages import control


class World:
    """An audience with a clock and a socket that are seen through."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.made = 0
        self.sent: dict[str, list[msgspec.Raw]] = {}
        self.unreachable: set[str] = set()
        self.audience = Audience(self, self.view, self.clock)

    def view(self) -> control.ViewReply:
        self.made += 1
        return control.ViewReply({"step": self.made})

    def send_to_all(self, peers: Iterable[str], body: msgspec.Raw) -> list[str]:
        for peer in peers:
            if peer not in self.unreachable:
                self.sent.setdefault(peer, []).append(body)
        return [peer for peer in peers if peer in self.unreachable]

    def seconds(self, count: int) -> None:
        for _ in range(count):
            self.clock.now += VIEW_SECONDS
            for _turn in self.audience.send_view():
                pass


def step_in(view: object) -> int:
    assert isinstance(view, msgspec.Raw)
    step: int = msgspec.msgpack.decode(view, type=control.ViewReply).view["step"]
    return step


def test_a_hundred_watchers_cost_one_view_a_second() -> None:
    world = World()
    names = [f"user-{i}" for i in range(100)]
    assert {step_in(world.audience.join(name)) for name in names} == {1}
    world.seconds(10)
    assert world.made == 11
    for name in names:
        assert [step_in(one) for one in world.sent[name]] == list(range(2, 12)), "each change, once"
        assert step_in(world.audience.join(name)) == 11, "who asks again gets what there is"
    for second in range(10):
        assert len({id(sent[second]) for sent in world.sent.values()}) == 1, "the same bytes"
    assert world.made == 11


def test_nothing_is_made_without_an_audience() -> None:
    world = World()
    world.seconds(5)
    assert world.made == 0


def test_who_does_not_ask_again_is_forgotten() -> None:
    """A process that is stopped holds its connection; what waits for it is bounded."""
    world = World()
    world.audience.join("stopped")
    for _ in range(4):
        world.audience.join("alive")
        world.seconds(20)
    assert len(world.sent["alive"]) == 80
    assert len(world.sent["stopped"]) * VIEW_SECONDS < control.WATCH_SECONDS
    assert len(world.audience) == 1
    made = world.made
    world.seconds(1000)
    assert world.made - made <= control.WATCH_SECONDS, "the last one has gone, too"


def test_who_cannot_be_sent_anything_is_forgotten_until_it_asks() -> None:
    world = World()
    world.audience.join("dead")
    world.audience.join("alive")
    world.unreachable.add("dead")
    world.seconds(1)
    assert len(world.audience) == 1
    world.unreachable.clear()
    world.seconds(2)
    assert "dead" not in world.sent
    world.audience.join("dead")
    world.seconds(1)
    assert len(world.sent["dead"]) == 1


def test_the_audience_is_bounded() -> None:
    world = World()
    for number in range(MAX_WATCHERS):
        world.audience.join(f"user-{number}")
    refused = world.audience.join("one more")
    assert isinstance(refused, control.Refused)
    assert f"this run has {MAX_WATCHERS} watchers" in refused.reason
    assert step_in(world.audience.join("user-7")) == 1, "who has a place keeps it"
    assert len(world.audience) == MAX_WATCHERS


def test_a_view_that_cannot_be_made_ends_no_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audience_module, "VIEW_SECONDS", 0.01)
    world, fails = World(), True

    def view() -> control.ViewReply:
        if world.made == 1 and fails:
            raise KeyError("a defect")
        return world.view()

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - the audience has no event
                await asyncio.sleep(0.01)

    async def check() -> None:
        nonlocal fails
        audience = Audience(world, view)
        showing = asyncio.create_task(audience.show())
        audience.join("somebody")
        await until(lambda: not len(audience))
        assert "watchers have to ask again" in caplog.text
        fails = False
        audience.join("somebody")
        await until(lambda: len(world.sent.get("somebody", ())) >= 2)
        assert not showing.done()
        showing.cancel()

    asyncio.run(check())


def test_a_reply_is_made_once_in_an_interval_unless_it_is_forgotten() -> None:
    clock, made = FakeClock(), 0

    def make() -> control.Reply:
        nonlocal made
        made += 1
        return control.Accepted(str(made))

    reply = EncodedOnce(make, 0.5, clock)
    assert reply.seconds_left == 0
    first = reply.reply()
    assert reply.seconds_left == 0.5
    clock.now = 0.4
    assert reply.reply() is first
    clock.now = 0.5
    assert reply.reply() is not first
    reply.forget()
    reply.reply()
    assert made == 3
