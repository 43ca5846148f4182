"""Only who holds a key of the run may speak, and only under the name that the key stands for."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from hostile_frames import raw_peer

from asyncrl.wire import Hub, Line, NoReply, RunKey, RuntimeDirectory
from asyncrl.wire.errors import KeyUnusable
from asyncrl.wire.messages import from_generator, to_generator
from asyncrl.wire.transport.decoding import Reason
from asyncrl.wire.transport.keys import HubKeys, LineKeys
from asyncrl.wire.transport.refusals import Refusals

KEY, OTHER_RUN = RunKey.new(), RunKey.new()
GOODBYE = from_generator.Goodbye("g")


@pytest.fixture
def address() -> Iterator[str]:
    directory = RuntimeDirectory()
    yield directory.address("control")
    directory.close()


def hub_at(
    address: str, refused: Counter[Reason], keys: HubKeys | None = None
) -> Hub[from_generator.FromGenerator]:
    return Hub(
        address,
        KEY.hub("control") if keys is None else keys,
        from_generator.FromGenerator,
        Refusals(lambda reason: refused.update([reason])),
    )


def line_to(address: str, keys: LineKeys) -> Line[to_generator.ToGenerator]:
    return Line(address, keys, to_generator.ToGenerator)


async def until_refused(refused: Counter[Reason], count: int) -> None:
    while refused.total() < count:  # noqa: ASYNC110 - counted by a callback
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "keys", [None, OTHER_RUN.line("control", "g"), KEY.line("data", "g")], ids=str
)
def test_a_forger_without_the_runs_key_is_not_heard(address: str, keys: LineKeys | None) -> None:
    async def check() -> None:
        refused: Counter[Reason] = Counter()
        hub = hub_at(address, refused)
        forger = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        forger.setsockopt(zmq.IDENTITY, b"g")
        if keys is not None:
            forger.curve_serverkey = keys.hub
            forger.curve_publickey, forger.curve_secretkey = zmq.curve_keypair()
        forger.connect(address)
        await forger.send(msgspec.msgpack.encode(GOODBYE))
        own = line_to(address, KEY.line("control", "g"))
        await own.send(from_generator.Goodbye("the real one"))
        async with asyncio.timeout(60):
            assert await hub.receive() == ("g", from_generator.Goodbye("the real one"))
            listening = asyncio.create_task(hub.receive())
            await until_refused(refused, 1)
        listening.cancel()
        assert refused.keys() == {Reason.UNAUTHENTICATED}
        forger.close(linger=0)
        own.close()
        hub.close()

    asyncio.run(check())


def test_nobody_takes_the_name_of_another(address: str) -> None:
    async def check() -> None:
        refused: Counter[Reason] = Counter()
        hub = hub_at(address, refused)
        keys = KEY.line("control", "g")
        own = line_to(address, keys)
        await own.send(GOODBYE)
        async with asyncio.timeout(60):
            assert await hub.receive() == ("g", GOODBYE)
            other = KEY.line("control", "h")
            for identity in (b"g", b"g" + other.identity[-16:], b"\xff" * 20, b"\1"):
                with raw_peer(address, msgspec.structs.replace(other, identity=identity)) as forger:
                    await forger.send(msgspec.msgpack.encode(GOODBYE))
                    listening = asyncio.create_task(hub.receive())
                    await until_refused(refused, refused.total() + 1)
                    listening.cancel()
        await hub.send("g", to_generator.Pause())
        assert await own.receive_within(60, what="a command") == to_generator.Pause()
        own.close()
        hub.close()

    asyncio.run(check())


def test_a_name_has_one_holder_and_a_new_connection_of_it_replaces_the_old(address: str) -> None:
    async def check() -> None:
        hub = hub_at(address, Counter())
        lines = []
        async with asyncio.timeout(60):
            for _ in range(2):  # the second connects when the first one has
                lines.append(line_to(address, KEY.line("control", "g")))
                await lines[-1].send(GOODBYE)
                assert await hub.receive() == ("g", GOODBYE)
        old, new = lines
        await hub.send("g", to_generator.Pause())
        assert await new.receive_within(60, what="a command") == to_generator.Pause()
        with pytest.raises(NoReply):
            await old.receive_within(0.05, what="a command")
        for socket in (old, new, hub):
            socket.close()

    asyncio.run(check())


def test_a_socket_in_the_place_of_the_hub_learns_nothing(address: str) -> None:
    async def check() -> None:
        impostor = hub_at(address, Counter(), OTHER_RUN.hub("control"))
        line = line_to(address, KEY.line("control", "g"))
        await line.send(GOODBYE)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await impostor.receive()
        line._socket.close(linger=0)
        impostor.close()

    asyncio.run(check())


def test_hubs_and_lines_leave_no_thread_behind(address: str) -> None:
    async def check() -> None:
        hub = hub_at(address, Counter())
        line = line_to(address, KEY.line("control", "g"))
        await line.send(GOODBYE)
        await hub.receive()
        line.close()
        hub.close()

    asyncio.run(check())
    before = threading.active_count()
    asyncio.run(check())
    assert threading.active_count() == before


def test_a_key_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "control.key"
    path.write_text("left by an earlier run")
    path.chmod(0o644)
    KEY.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert RunKey.read(path) == KEY
    path.chmod(0o640)
    with pytest.raises(KeyUnusable, match=r"control\.key is not a key that only its owner"):
        RunKey.read(path)
    path.unlink()
    with pytest.raises(KeyUnusable, match=r"control\.key cannot be read: No such file"):
        RunKey.read(path)


def test_keys_do_not_show_in_logs_and_differ() -> None:
    hub, line = KEY.hub("control"), KEY.line("control", "g")
    assert f"{KEY} {hub} {line}" == "RunKey() HubKeys() LineKeys('g')"
    keys = {
        secret
        for run in (KEY, OTHER_RUN)
        for name in ("control", "data")
        for secret in (run.hub(name).secret, run.hub(name).passes, run.hub(name).public)
    }
    assert len(keys) == 12
    assert KEY.hub("control").name_in(line.identity) == "g"
    assert KEY.hub("data").name_in(line.identity) is None
