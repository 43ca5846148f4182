"""Control messages through a relay that is a process of its own, and is killed in mid-traffic."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from control_relay_process import Options

from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire import Hub, RunKey, RuntimeDirectory
from asyncrl.wire.messages import from_generator, to_generator
from asyncrl.wire.sessions.line import SessionLine
from asyncrl.wire.sessions.peers import bundles_of
from asyncrl.wire.sessions.session import Limits, Session, new_session
from asyncrl.wire.sockets import identify
from asyncrl.wire.transport.decoding import Reason

CHILDREN = 3
MESSAGES = 2000
WINDOW = 100
SECONDS = 120
KEY = RunKey.new()
PROGRAM = Path(__file__).parents[2] / "support" / "control_relay_process.py"


def is_relay(name: str) -> bool:
    return name.startswith("relay-")


class Relays:
    """The relay of a node, and those that replace it."""

    def __init__(self, runtime: RuntimeDirectory, controller: str) -> None:
        self.address = runtime.address("relay")
        self._controller = controller
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self) -> str:
        """Start the next one; its name."""
        name = f"relay-0.{len(self._running)}"
        process = subprocess.Popen([sys.executable, str(PROGRAM)], stdin=subprocess.PIPE)
        secret = KEY.hub("relays").secret
        keys = KEY.line("control", name)
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(
                msgspec.msgpack.encode(Options(self.address, secret, self._controller, keys))
            )
        self._running.append(process)
        return name

    def kill(self) -> None:
        """SIGKILL the present one."""
        self._running[-1].kill()
        self._running[-1].wait()

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()


class Controller:
    """Answers the n-th message of each child with the n-th command."""

    def __init__(self) -> None:
        self.hub: Hub[Any] = Hub(
            "tcp://127.0.0.1:*",
            KEY.hub("control"),
            from_generator.FromGenerator,
            is_relay=is_relay,
        )
        self.got: dict[str, list[int]] = {f"generator-{n}": [] for n in range(CHILDREN)}
        self.relays: list[str] = []
        self.changed = asyncio.Event()

    async def serve(self) -> None:
        while True:
            peer, message = await self.hub.receive()
            if is_relay(peer):
                self.relays.append(peer)
            elif isinstance(message, from_generator.SampleDelivered):
                number = message.sample.group
                self.got[peer].append(number)
                self.hub.send_soon(peer, to_generator.Discard((SampleId(number, 0),)))
            self.changed.set()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Child:
    """Reports samples, and takes note of the commands."""

    def __init__(self, number: int, address: str) -> None:
        self.name = f"generator-{number}"
        keys = KEY.relayed_line("control", "relays", self.name)
        self.line: SessionLine[Any] = SessionLine(address, keys, to_generator.ToGenerator)
        self.got: list[int] = []
        self.changed = asyncio.Event()
        self.has_all = asyncio.Event()

    async def send(self, count: int) -> None:
        for number in range(count):
            message = from_generator.SampleDelivered(self.name, SampleId(number, 0))
            while number - len(self.got) >= WINDOW:  # so relays are killed in mid-traffic
                self.changed.clear()
                await self.changed.wait()
            self.line.send_soon(message, urgent=number % 10 == 0)
            if number % 3 == 0:
                await asyncio.sleep(0)

    async def serve(self) -> None:
        while True:
            self.got.append((await self.line.receive()).samples[0].group)
            self.changed.set()
            if len(self.got) == MESSAGES:
                self.has_all.set()


async def everything_is_acknowledged(children: list[Child]) -> None:
    async with asyncio.timeout(SECONDS):
        for child in children:
            while child.line.session.unacknowledged:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.fixture
def runtime() -> Iterator[RuntimeDirectory]:
    directory = RuntimeDirectory()
    yield directory
    directory.close()


def test_a_killed_relay_loses_and_doubles_nothing(runtime: RuntimeDirectory) -> None:
    """Two relays are killed while three children and the controller speak."""

    async def main() -> None:
        controller = Controller()
        resent: list[int] = []
        controller.hub.sessions.count_resent = resent.append
        relays = Relays(runtime, controller.hub.address)
        children = [Child(n, relays.address) for n in range(CHILDREN)]
        tasks = [asyncio.create_task(controller.serve())]
        tasks += [asyncio.create_task(child.serve()) for child in children]
        for child in children:
            child.line.session.count_resent = resent.append
        sending = [asyncio.create_task(one.send(MESSAGES)) for one in children]
        try:
            for share in (0.2, 0.6):
                name = relays.start()
                await controller.until(
                    lambda share=share, name=name: (
                        name in controller.relays
                        and all(len(one) >= share * MESSAGES for one in controller.got.values())
                    )
                )
                relays.kill()
                assert any(len(one) < MESSAGES for one in controller.got.values())
            name = relays.start()
            await controller.until(lambda: name in controller.relays)
            await asyncio.gather(*sending)
            await asyncio.wait_for(
                asyncio.gather(*(one.has_all.wait() for one in children)), SECONDS
            )
            await everything_is_acknowledged(children)
            assert sum(resent) > 0, "a killed relay had nothing under way"
            for child in children:
                child.line.close()
        finally:
            for task in (*tasks, *sending):
                task.cancel()
            relays.close()
            controller.hub.close()
        everything = list(range(MESSAGES))
        assert controller.got == {child.name: everything for child in children}
        assert [child.got for child in children] == [everything] * CHILDREN
        assert controller.relays == ["relay-0.0", "relay-0.1", "relay-0.2"]

    asyncio.run(main())


def test_a_child_that_acknowledges_nothing_is_cut_off(
    runtime: RuntimeDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller keeps a bounded number of frames, and says who did not take them."""

    async def main() -> None:
        controller = Controller()
        cut_off: dict[str, str] = {}
        controller.hub.refusals.on_cut_off = cut_off.__setitem__
        relays = Relays(runtime, controller.hub.address)
        child = Child(0, relays.address)
        task = asyncio.create_task(controller.serve())
        try:
            relays.start()
            await child.send(1)
            await controller.until(lambda: controller.got[child.name] == [0])
            relays.kill()
            for number in range(5):
                await controller.hub.send(child.name, to_generator.Discard((SampleId(number, 0),)))
        finally:
            task.cancel()
            relays.close()
            child.line.close()
            controller.hub.close()
        assert list(cut_off) == [child.name]
        assert "does not acknowledge its messages: 3 frames" in cut_off[child.name]

    monkeypatch.setattr("asyncrl.wire.sessions.peers.LIMITS", Limits(frames=3))
    asyncio.run(main())


def test_only_relays_may_send_bundles_and_only_of_peers_whose_passes_they_know(
    runtime: RuntimeDirectory,
) -> None:
    """A generator sends one; then a relay, with a forged frame and a true one."""

    def bundle(identity: bytes) -> bytes:
        message = from_generator.Goodbye("generator-1")
        frame = Session(new_session()).send(msgspec.msgpack.encode(message), 0.0)
        (made,) = bundles_of([(identity, frame)])
        return made

    async def main() -> None:
        controller = Controller()
        refused: list[Reason] = []
        controller.hub.refusals.count = refused.append
        true = KEY.hub("control").identity_of("generator-1")
        forged = b"generator-1" + KEY.hub("control").identity_of("generator-2")[-16:]
        context = zmq.asyncio.Context.instance()
        try:
            for name, identity in (
                ("generator-2", true),
                ("relay-0", forged),
                ("relay-0.1", b"generator-1"),
                ("relay-0.2", true),
            ):
                socket = context.socket(zmq.DEALER)
                identify(socket, KEY.line("control", name))
                socket.connect(controller.hub.address)
                await socket.send(bundle(identity))
                if name == "relay-0.2":
                    async with asyncio.timeout(SECONDS):
                        assert (await controller.hub.receive())[0] == "generator-1"
                else:
                    before = len(refused)
                    attending = asyncio.create_task(controller.hub.attend())
                    async with asyncio.timeout(SECONDS):
                        while len(refused) == before:  # noqa: ASYNC110 - a callback says it
                            await asyncio.sleep(0.01)
                    attending.cancel()
                socket.close(0)
        finally:
            controller.hub.close()
        assert refused == [Reason.MALFORMED, Reason.UNKNOWN_PEER, Reason.UNKNOWN_PEER]

    asyncio.run(main())
