"""Who copies the files of which nodes, and what is brought where; relays are not started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_processes import generator_spec
from msgspec.structs import replace

from asyncrl.fleet.node_files import NodeFiles
from asyncrl.fleet.shutdown import raise_if_late
from asyncrl.launch.child_spec import files_hub
from asyncrl.wire import RunKey
from asyncrl.wire.messages import from_relay, to_relay

KEY = RunKey.new()


class Nodes:
    """Relays by node, and the processes of each."""

    def __init__(self) -> None:
        self.are_used = True
        self.ready: dict[str, Any] = {}
        self.sent: list[tuple[str, Any]] = []
        self.workers: list[Any] = []
        self.files = NodeFiles(
            self,  # type: ignore[arg-type]
            KEY,
            lambda name, message: self.sent.append((name, message)),
            Path("/runs/mine"),
        )

    def by_node(self) -> dict[str, Any]:
        return self.ready

    def names_on(self, node: str) -> list[str]:
        return [self.ready[node].name]

    def relay(self, node: str, name: str, *, shares: bool = False) -> None:
        ready = from_relay.FilesReady(f"tcp://{name}:1", f"folder-{node}", shares)
        said = from_relay.RelayReady("", "", files=ready)
        self.ready[node] = SimpleNamespace(name=name, ready_message=said)

    def process(self, node: str | None, name: str) -> None:
        self.workers.append(SimpleNamespace(name=name, node=node))

    def update(self) -> list[tuple[str, Any]]:
        self.files.update(self.workers)
        sent, self.sent[:] = list(self.sent), []
        return sent


def three_nodes() -> Nodes:
    nodes = Nodes()
    nodes.process("home", "trainer")
    for number in (0, 1):
        nodes.process(f"node-{number}", f"generator-{number}")
    nodes.process(None, "generator-2")
    nodes.relay("home", "relay-0", shares=True)
    nodes.relay("node-0", "relay-1")
    nodes.relay("node-1", "relay-2")
    return nodes


def test_two_nodes_of_one_machine_share_a_folder() -> None:
    nodes = three_nodes()
    nodes.ready["node-1"].ready_message = nodes.ready["node-0"].ready_message
    ((_, order),) = nodes.update()
    (source,) = order.sources
    assert source.processes == ("generator-0", "generator-1", "relay-1", "relay-2")


def test_a_relay_that_sees_the_run_copies_the_files_of_those_that_do_not() -> None:
    nodes = three_nodes()
    ((copier, order),) = nodes.update()
    assert copier == "relay-0"
    assert [(one.server.name, one.folder, one.processes) for one in order.sources] == [
        ("relay-1", "folder-node-0", ("generator-0", "relay-1")),
        ("relay-2", "folder-node-1", ("generator-1", "relay-2")),
    ]
    assert order.sources[0].server.keys == KEY.line(files_hub("relay-1"), "relay-0")
    assert nodes.update() == [], "nothing has changed"
    nodes.process("node-0", "generator-0.1")
    ((_, order),) = nodes.update()
    assert order.sources[0].processes == ("generator-0", "generator-0.1", "relay-1")
    nodes.relay("home", "relay-0.1", shares=True)
    ((copier, _),) = nodes.update()
    assert copier == "relay-0.1", "a replacement is told what the lost one was"


def test_nodes_that_all_see_the_run_copy_nothing() -> None:
    nodes = Nodes()
    nodes.relay("home", "relay-0", shares=True)
    nodes.relay("other", "relay-1", shares=True)
    assert nodes.update() == []
    assert asyncio.run(nodes.files.finish(None, 9.0)) == ""  # type: ignore[arg-type]


class FakeHub:
    def __init__(self, *messages: tuple[str, Any]) -> None:
        self.waiting, self.kept = list(messages), []

    async def receive(self) -> tuple[str, Any]:
        if not self.waiting:
            await asyncio.sleep(600)
        return self.waiting.pop(0)

    def put_back(self, messages: list[tuple[str, Any]]) -> None:
        self.kept += messages


def finish(nodes: Nodes, left: dict[str, str]) -> str:
    other = ("trainer", "its last words")
    hub: Any = FakeHub(other, ("relay-0", from_relay.PullFinished(left)))
    text = asyncio.run(nodes.files.finish(hub, 9.0))
    assert hub.kept == [other]
    return text


def test_the_last_copy_is_waited_for_and_what_is_missing_is_named() -> None:
    nodes = three_nodes()
    nodes.update()
    del nodes.ready["node-1"]  # its machine is gone
    nodes.update()
    text = finish(nodes, {})
    assert "(relay-2: its node lacks a relay)" in text
    assert nodes.sent == [
        ("relay-0", to_relay.FinishPull(9.0)),
        ("relay-1", to_relay.RemoveFiles()),
    ]
    nodes = three_nodes()
    nodes.update()
    assert finish(nodes, {}) == ""
    nodes = three_nodes()
    nodes.update()
    text = finish(nodes, {"relay-1": "No space left on device"})
    assert "relay-1: No space left on device" in text
    assert ("relay-1", to_relay.RemoveFiles()) not in nodes.sent
    assert ("relay-2", to_relay.RemoveFiles()) in nodes.sent
    with pytest.raises(Exception, match=r"generator-0 did not end within 60 s .* No space left"):
        raise_if_late({"generator-0": 60.0}, text)
    assert asyncio.run(nodes.files.finish(None, 0.0)) == ""  # type: ignore[arg-type] # Ctrl-C twice


def test_a_file_is_brought_from_its_node_or_from_the_runs_folder() -> None:
    async def check() -> None:
        nodes = three_nodes()
        path = "unfinished/moved/generator-0.bin"
        bringing = asyncio.create_task(nodes.files.bring(path, to="node-1", of="node-0"))
        await asyncio.sleep(0)
        ((name, order),) = nodes.sent
        assert (name, order.path) == ("relay-2", path)
        assert [one.name for one in order.servers] == ["relay-1", "relay-0"]
        names = [one.keys.name for one in order.servers]
        assert names == ["relay-2 fetch 1"] * 2, "not that of a relay that copies"
        assert order.servers[0].keys == KEY.line(files_hub("relay-1"), names[0])
        nodes.files.answered(from_relay.FileHere(order.attempt, path))
        assert await bringing == ""
        nodes.sent.clear()
        everywhere = asyncio.create_task(nodes.files.bring_to_all([path]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [name for name, _ in nodes.sent] == ["relay-1", "relay-2"]
        for name, order in nodes.sent:
            nodes.files.answered(from_relay.FileMissing(order.attempt, path, f"{name}: none"))
        assert await everywhere == ["relay-1: none", "relay-2: none"]
        assert await nodes.files.bring(path, to="nowhere", of="node-0") == "its node lacks a relay"

    asyncio.run(check())


def test_a_leavers_file_goes_to_the_run_and_to_every_node_that_does_not_see_it() -> None:
    async def check() -> None:
        nodes = three_nodes()
        await nodes.files.share("/runs/mine/unfinished/moved/generator-0.bin", "generator-0")
        nodes.update()
        sharing = asyncio.create_task(
            nodes.files.share("/runs/mine/unfinished/moved/generator-0.bin", "generator-0")
        )
        asked: list[tuple[str, list[str]]] = []
        for _ in range(3):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for name, order in nodes.sent:
                assert order.path == "unfinished/moved/generator-0.bin"
                asked.append((name, [one.name for one in order.servers]))
                nodes.files.answered(from_relay.FileHere(order.attempt, order.path))
            nodes.sent.clear()
        await sharing
        assert asked == [
            ("relay-0", ["relay-1"]),
            ("relay-1", ["relay-0"]),
            ("relay-2", ["relay-0"]),
        ]

    asyncio.run(check())


def test_paths_of_the_run_are_those_of_the_nodes_folder() -> None:
    spec = replace(generator_spec(), run_directory="/tmp/x", home_directory="/r")  # noqa: S108
    assert spec.here("/r/unfinished/a") == Path("/tmp/x/unfinished/a")  # noqa: S108
    assert spec.here("/runs/unfinished/a") == Path("/runs/unfinished/a")
    assert replace(generator_spec(), run_directory="/r").here("/r/a") == Path("/r/a")
