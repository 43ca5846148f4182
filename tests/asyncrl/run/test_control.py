"""The user's socket: requests are answered whatever else arrives there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from hostile_frames import CORPUS, raw_peer

from asyncrl.run.control import send_request, serve_control, user_hub
from wire import RunKey, RuntimeDirectory
from wire.decoding import Reason
from wire.messages import control
from wire.refusals import Refusals

KEY = RunKey.new()


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


def test_requests_are_answered_under_nonsense(address: str) -> None:
    async def check() -> None:
        refused: Counter[Reason] = Counter()
        hub = user_hub(address, KEY, Refusals(lambda reason: refused.update([reason])))
        serving = asyncio.create_task(serve_control(hub, answer))
        with raw_peer(address, KEY.line("user", "hostile")) as peer:
            for _ in range(20):
                for body in CORPUS.values():
                    await peer.send(body)
                await peer.send_multipart([b"", b"", b""])
            assert await send_request(address, KEY, control.StatusRequest()) == control.StatusReply(
                {"phase": "training"}
            )
            assert await send_request(address, KEY, control.StopRequest()) == control.Accepted(
                "stopping"
            )
        assert refused
        assert not serving.done()
        serving.cancel()
        hub.close()

    asyncio.run(check())


def test_a_request_that_fails_is_refused_and_the_next_one_served(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        hub = user_hub(address, KEY, Refusals())
        serving = asyncio.create_task(serve_control(hub, answer))
        reply = await send_request(address, KEY, control.PauseRequest())
        assert reply == control.Refused("the controller failed to carry it out: 'a defect'")
        assert "PauseRequest of user-" in caplog.text
        assert isinstance(
            await send_request(address, KEY, control.StatusRequest()), control.StatusReply
        )
        serving.cancel()
        hub.close()

    asyncio.run(check())
