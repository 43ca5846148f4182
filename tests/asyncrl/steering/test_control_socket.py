"""The user's socket: requests are answered whatever else arrives there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest
from hostile_frames import CORPUS, raw_peer

from asyncrl.steering.control_socket import send_request, serve_control, user_hub
from asyncrl.steering.status_stream import VIEW_SECONDS
from asyncrl.wire import Line, RunKey, RuntimeDirectory
from asyncrl.wire.messages import control
from asyncrl.wire.transport.decoding import Reason
from asyncrl.wire.transport.refusals import Refusals

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


def view() -> control.ViewReply:
    return control.ViewReply({"step": 7})


def test_requests_are_answered_under_nonsense(address: str) -> None:
    async def check() -> None:
        refused: Counter[Reason] = Counter()
        hub = user_hub(address, KEY, Refusals(lambda reason: refused.update([reason])))
        serving = asyncio.create_task(serve_control(hub, answer, view))
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
        serving = asyncio.create_task(serve_control(hub, answer, view))
        reply = await send_request(address, KEY, control.PauseRequest())
        assert reply == control.Refused("the request failed in the controller: 'a defect'")
        assert "PauseRequest of user-" in caplog.text
        assert isinstance(
            await send_request(address, KEY, control.StatusRequest()), control.StatusReply
        )
        serving.cancel()
        hub.close()

    asyncio.run(check())


def test_watchers_are_shown_the_run_and_asking_again_is_no_second_place(address: str) -> None:
    """Through real sockets, one of which is closed: the others are shown each view."""

    async def check() -> None:
        made = 0

        def counted() -> control.ViewReply:
            nonlocal made
            made += 1
            return control.ViewReply({"step": made})

        hub = user_hub(address, KEY, Refusals())
        serving = asyncio.create_task(serve_control(hub, answer, counted))
        lines = [Line(address, KEY.line("user", f"user-{i}"), control.Reply) for i in range(20)]
        began = asyncio.get_running_loop().time()
        for line in lines:
            await line.send(control.WatchRequest())
        await lines[0].send(control.WatchRequest())
        lines.pop().close()
        for line in lines:
            steps = [0]
            while steps[-1] < 3:
                shown = await line.receive_within(60, what="a view")
                assert isinstance(shown, control.ViewReply)
                steps.append(shown.view["step"])
            assert sorted({*steps[1:]}) == list(range(steps[1], steps[-1] + 1)), "none is left out"
        assert made <= 1 + (asyncio.get_running_loop().time() - began) / VIEW_SECONDS
        serving.cancel()
        hub.close()
        for line in lines:
            line.close()

    asyncio.run(check())
