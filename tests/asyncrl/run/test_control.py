"""The user's socket: requests are answered whatever else arrives there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from hostile_frames import CORPUS, raw_peer

from asyncrl.run.control import serve_control, user_hub
from wire import Line, RuntimeDirectory
from wire.decoding import Reason
from wire.messages import control
from wire.refusals import Refusals


@pytest.fixture
def address() -> Iterator[str]:
    directory = RuntimeDirectory()
    yield directory.address("user")
    directory.close()


async def answer(request: control.Request) -> control.Reply:
    match request:
        case control.StatusRequest():
            return control.StatusReply({"phase": "training"})
        case control.StopRequest():
            return control.Accepted("stopping")
        case _:
            raise KeyError("a defect")


async def ask(address: str, request: control.Request) -> control.Reply:
    line: Line[control.Reply] = Line(address, "user-1", control.Reply)
    try:
        await line.send(request)
        return await line.receive_within(10, what="the controller's answer")
    finally:
        line.close()


def test_requests_are_answered_under_nonsense(address: str) -> None:
    async def check() -> None:
        refused: Counter[Reason] = Counter()
        hub = user_hub(address, Refusals(lambda reason: refused.update([reason])))
        serving = asyncio.create_task(serve_control(hub, answer))
        with raw_peer(address, b"hostile") as peer:
            for _ in range(20):
                for body in CORPUS.values():
                    await peer.send(body)
                await peer.send_multipart([b"", b"", b""])
            assert await ask(address, control.StatusRequest()) == control.StatusReply(
                {"phase": "training"}
            )
            assert await ask(address, control.StopRequest()) == control.Accepted("stopping")
        assert refused
        assert not serving.done()
        serving.cancel()
        hub.close()

    asyncio.run(check())


def test_a_request_that_fails_is_refused_and_the_next_one_served(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        hub = user_hub(address, Refusals())
        serving = asyncio.create_task(serve_control(hub, answer))
        reply = await ask(address, control.PauseRequest())
        assert reply == control.Refused("the controller failed to carry it out: 'a defect'")
        assert "PauseRequest of user-1 failed" in caplog.text
        assert isinstance(await ask(address, control.StatusRequest()), control.StatusReply)
        serving.cancel()
        hub.close()

    asyncio.run(check())
