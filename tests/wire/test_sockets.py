from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire import Hub, Line, NoReply, RunKey, RuntimeDirectory, Unreachable
from asyncrl.wire.errors import KeyUnusable
from asyncrl.wire.messages import from_generator, to_generator
from asyncrl.wire.transport.addresses import (
    is_private,
    remove_stale_directories,
    runtime_directory_of,
)
from asyncrl.wire.transport.keys import HubKeys
from asyncrl.wire.weights.layout import Fingerprint

KEY = RunKey.new()


@pytest.fixture
def runtime() -> Iterator[RuntimeDirectory]:
    directory = RuntimeDirectory()
    yield directory
    directory.close()
    assert not directory.path.exists()


def test_messages_go_both_ways_by_name(runtime: RuntimeDirectory) -> None:
    async def talk() -> None:
        address = runtime.address("control")
        hub: Hub[from_generator.FromGenerator] = Hub(
            address, KEY.hub("control"), from_generator.FromGenerator
        )
        line: Line[to_generator.ToGenerator] = Line(
            address, KEY.line("control", "g"), to_generator.ToGenerator
        )
        ready = from_generator.GeneratorReady("g", 4, 0, Fingerprint({}, ""))
        await line.send(ready)
        async with asyncio.timeout(60):
            assert await hub.receive() == ("g", ready)
        discard = to_generator.Discard((SampleId(1, 2),))
        await hub.send("g", discard)
        assert await line.receive_within(60, what="a message") == discard
        with pytest.raises(Unreachable, match="Discard could not be sent to nobody"):
            await hub.send("nobody", discard)
        hub.close()
        line.close()

    asyncio.run(talk())


def test_a_message_of_the_other_direction_is_refused_and_logged(
    runtime: RuntimeDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk() -> None:
        address = runtime.address("control")
        hub: Hub[from_generator.FromGenerator] = Hub(
            address, KEY.hub("control"), from_generator.FromGenerator
        )
        line: Line[to_generator.ToGenerator] = Line(
            address, KEY.line("control", "g"), to_generator.ToGenerator
        )
        await line.send(to_generator.Pause())  # belongs to the other direction
        await line.send(from_generator.Goodbye("g"))
        async with asyncio.timeout(60):
            assert (await hub.receive())[1] == from_generator.Goodbye("g")
        assert "from 'g' (unexpected): Invalid value 'Pause'" in caplog.text
        hub.close()
        line.close()

    asyncio.run(talk())


def test_a_wait_is_bounded_and_names_what_it_waits_for(runtime: RuntimeDirectory) -> None:
    async def talk() -> None:
        line: Line[to_generator.ToGenerator] = Line(
            runtime.address("nobody"), KEY.line("control", "g"), to_generator.ToGenerator
        )
        with pytest.raises(NoReply, match="for the answer at ipc"):
            await line.receive_within(0.05, what="the answer")
        line.close()

    asyncio.run(talk())


def test_socket_folders_of_killed_processes_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tmp_path = Path(tempfile.mkdtemp())  # pytest's own folders have paths too long for sockets
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    living = RuntimeDirectory()
    program = (
        "import os; from asyncrl.wire import RuntimeDirectory\n"
        "print(RuntimeDirectory().path, flush=True); os.kill(0, 9)"
    )
    made = subprocess.run(
        [sys.executable, "-c", program],
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    killed = Path(made.stdout.strip())
    assert runtime_directory_of(f"ipc://{killed}/user") == killed
    other = tmp_path / "asyncrl-notes"
    other.mkdir(mode=0o700)
    remove_stale_directories()
    assert not killed.exists()
    assert living.path.exists()
    assert other.exists()
    living.close()
    assert runtime_directory_of(f"ipc://{killed}/user") is None
    shutil.rmtree(tmp_path)
    assert runtime_directory_of(f"ipc://{other}/../user") is None


def test_sockets_are_in_a_private_folder(runtime: RuntimeDirectory) -> None:
    assert is_private(runtime.path)
    runtime.path.chmod(0o755)
    assert not is_private(runtime.path)
    assert len(runtime.address("control")) < 107


def test_nothing_listens_without_a_key() -> None:
    for address in ("tcp://0.0.0.0:*", "tcp://127.0.0.1:*"):
        with pytest.raises(KeyUnusable, match="without a CURVE key"):
            Hub(address, HubKeys(b"", b""), from_generator.FromGenerator)


def test_a_line_moves_to_another_hub(runtime: RuntimeDirectory) -> None:
    """As a generator does when its trainer was restarted on another node."""

    async def talk() -> None:
        hubs: list[Hub[from_generator.FromGenerator]] = [
            Hub("tcp://127.0.0.1:*", KEY.hub("data"), from_generator.FromGenerator)
            for _ in range(2)
        ]
        line: Line[to_generator.ToGenerator] = Line(
            "", KEY.line("data", "g"), to_generator.ToGenerator
        )
        with pytest.raises(Unreachable):
            await line.send(from_generator.Goodbye("g"))
        assert hubs[0].address != hubs[1].address
        for hub in (*hubs, hubs[0]):
            line.move_to(hub.address)
            for number in range(3):
                await line.send(from_generator.SampleDelivered("g", SampleId(number, 0)))
            async with asyncio.timeout(60):
                for number in range(3):
                    expected = from_generator.SampleDelivered("g", SampleId(number, 0))
                    assert await hub.receive() == ("g", expected)
        for hub in hubs:
            hub.close()
        line.close()

    asyncio.run(talk())
