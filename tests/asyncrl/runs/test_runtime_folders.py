"""A run whose folder, or the folder of whose sockets, is removed while it is active."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import RunFailed, UserError
from asyncrl.runs.directory import RunState
from asyncrl.runs.runtime_folders import LOOK_SECONDS, Folder, Surroundings
from asyncrl.steering.control_socket import _door
from asyncrl.wire import Hub, Line, RunKey, RuntimeDirectory
from asyncrl.wire.messages import control
from asyncrl.wire.transport.addresses import remove_stale_directories

KEY = RunKey.new()


class FakeRun:
    def __init__(self) -> None:
        self.stopped = 0
        self.errors: list[Exception] = []

    async def stop(self) -> None:
        self.stopped += 1

    def fail(self, error: Exception) -> None:
        self.errors.append(error)


class World:
    """A run's folder, its sockets, and a clock that stands until `look`."""

    def __init__(self, tmp_path: Path, parent: Path) -> None:
        self.folder = tmp_path / "runs" / "mine"
        self.folder.mkdir(parents=True)
        self.parent = parent
        self.runtime = RuntimeDirectory()
        self.hubs: list[Hub[Any]] = []
        self.run, self.said = FakeRun(), list[str]()
        self.slept: list[float] = []

    def hub(self) -> Hub[control.Request]:
        hub: Hub[control.Request] = Hub(
            self.runtime.address("user"), KEY.hub("user"), control.Request
        )
        self.hubs.append(hub)
        return hub

    async def look(self, happens: Callable[[], object], looks: int = 3) -> None:
        """Look so many times, after something happened."""

        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            if len(self.slept) > looks:
                raise asyncio.CancelledError

        around = Surroundings(
            Folder.at(self.folder), self.runtime, self.hubs, self.said.append, sleep
        )
        happens()
        with contextlib.suppress(asyncio.CancelledError):
            await around.look_after(self.run)

    async def heard(self, line: Line[Any], name: str) -> bool:
        """Whether the hub hears this peer."""
        await line.send(control.StatusRequest())
        async with asyncio.timeout(20):
            return (await self.hubs[0].receive())[0] == name


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    parent = Path("/tmp") / f"late-{tmp_path.name[:20]}-{id(monkeypatch) % 10**6}"  # noqa: S108
    parent.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(parent))
    made = World(tmp_path, parent)
    yield made
    made.runtime.close()
    shutil.rmtree(parent, ignore_errors=True)


def removed(folder: Path) -> None:
    shutil.rmtree(folder)


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replaced(folder: Path) -> None:
    moved(folder)
    folder.mkdir()


@pytest.mark.parametrize("happens", [removed, moved, replaced])
def test_a_run_without_its_folder_ends_with_an_error_that_is_said_once(
    world: World, happens: Callable[[Path], None]
) -> None:
    asyncio.run(world.look(lambda: happens(world.folder)))
    (error,) = world.run.errors
    assert isinstance(error, RunFailed)
    assert str(world.folder) in str(error)
    assert "--resume" in str(error)
    assert world.said == [f"the run's folder {world.folder} is gone, so the run ends"]
    assert world.slept == [LOOK_SECONDS]


def test_a_folder_that_is_there_is_nothing_to_talk_about(world: World) -> None:
    asyncio.run(world.look(lambda: (world.folder / "file").write_text("changed")))
    assert (world.run.errors, world.run.stopped, world.said) == ([], 0, [])
    assert len(world.slept) == 4


def test_whatever_fails_for_a_folder_that_is_gone_says_so(world: World) -> None:
    folder = Folder.at(world.folder)
    with folder.required():
        pass
    with pytest.raises(FileExistsError), folder.required():
        raise FileExistsError
    removed(world.folder)
    with pytest.raises(RunFailed, match="was removed, moved or replaced"), folder.required():
        raise UserError("the trainer ended")
    with pytest.raises(RunFailed, match="was removed, moved or replaced"), folder.required():
        pass


@pytest.mark.parametrize("what", ["folder", "socket"])
def test_removed_sockets_are_there_again_and_connections_stay(world: World, what: str) -> None:
    async def check() -> None:
        hub = world.hub()
        old = Line[Any](hub.address, KEY.line("user", "old"), control.Reply)
        assert await world.heard(old, "old")
        path = world.runtime.path
        happens = (path / "user").unlink if what == "socket" else lambda: removed(path)
        await world.look(happens)
        assert (world.run.errors, world.run.stopped) == ([], 0)
        (said,) = world.said
        assert "is there again" in said
        assert path.stat().st_mode & 0o077 == 0
        new = Line[Any](hub.address, KEY.line("user", "new"), control.Reply)
        assert await world.heard(new, "new")
        assert await world.heard(old, "old")
        remove_stale_directories()
        assert path.is_dir(), "its lock is held"
        for one in (old, new, hub):
            one.close()

    asyncio.run(check())


@pytest.mark.parametrize("instead", ["nothing", "open folder"])
def test_a_run_whose_sockets_cannot_be_there_again_ends_in_order(
    world: World, instead: str
) -> None:
    """As after a logout, when systemd has removed all of XDG_RUNTIME_DIR."""

    def happens() -> None:
        removed(world.parent)
        if instead == "open folder":
            world.runtime.path.mkdir(parents=True)
            world.runtime.path.chmod(0o755)

    async def check() -> None:
        hub = world.hub()
        await world.look(happens)
        hub.close()

    asyncio.run(check())
    assert (world.run.errors, world.run.stopped) == ([], 1)
    (said,) = world.said
    assert str(world.runtime.path) in said
    assert "--resume" in said
    assert "XDG_RUNTIME_DIR" in said


def test_other_commands_say_what_to_do(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    state = RunState(4321, control_address=world.runtime.address("user"))
    monkeypatch.setattr("asyncrl.steering.control_socket.read_state", lambda _: state)
    monkeypatch.setattr("asyncrl.steering.control_socket.is_alive", lambda _: True)
    removed(world.runtime.path)
    with pytest.raises(UserError, match=r"was removed.*try again.*`kill -TERM 4321`"):
        _door(world.folder)
    world.runtime.path.mkdir()
    world.runtime.path.chmod(0o755)
    with pytest.raises(UserError, match=r"can access.*chmod 700"):
        _door(world.folder)
