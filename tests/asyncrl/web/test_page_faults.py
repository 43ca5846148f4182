"""Whatever goes wrong with the page, the run goes on and ends in order."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from asyncrl.config.run_config import parse_config
from asyncrl.controller.web_page import open_page
from asyncrl.errors import UserError
from asyncrl.launch.records import ProcessRecords
from asyncrl.monitoring.config import WebConfig
from asyncrl.runs.directory import RunDirectory
from asyncrl.web import serving
from asyncrl.web.serving import WebPage


class Page(WebPage):
    """One of whose processes the test decides."""

    start: Callable[[], Any]

    def _start(self) -> Any:
        return self.start()


async def with_page(
    tmp_path: Path, start: Callable[[Page], Any], work: Callable[[Page, list[str]], Awaitable[None]]
) -> None:
    said: list[str] = []
    page = Page(WebConfig(), tmp_path, ProcessRecords(tmp_path), said.append)
    page.start = lambda: start(page)
    address = urlsplit(page.url)
    with socket.create_connection((address.hostname, address.port)):
        await work(page, said)
        await page.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_an_unexpected_error_ends_the_page_and_nothing_else(tmp_path: Path) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    def start(page: Page) -> None:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        page._process = subprocess.Popen(command)
        begun.append(page._process)
        raise RuntimeError("can't start new thread")

    async def work(_page: Page, said: list[str]) -> None:
        await until(lambda: bool(said))
        (why,) = said
        assert why.endswith("RuntimeError: can't start new thread. Training continues")

    asyncio.run(with_page(tmp_path, start, work))
    assert begun[0].returncode is not None, "the process was left behind"


def test_closing_never_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    def start(page: Page) -> Any:
        page._process = subprocess.Popen(
            [sys.executable, "-c", "import signal, time; signal.pause()"]
        )
        monkeypatch.setattr(asyncio, "to_thread", no_thread)
        page._given_up = no_thread
        return page._process

    async def work(page: Page, _said: list[str]) -> None:
        await until(page._task.done)

    asyncio.run(with_page(tmp_path, start, work))


class Ended:
    """A process that ended at once."""

    def wait(self, _seconds: float = 0) -> int:
        return 1

    def __getattr__(self, _name: str) -> Callable[[], None]:
        return lambda: None


@pytest.mark.parametrize(("long_lives", "starts"), [(0, 4), (1, 7)])
def test_a_process_that_lived_long_is_not_held_against_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_lives: int, starts: int
) -> None:
    """Four ends in a run of weeks do not take its page away."""
    monkeypatch.setattr(serving, "PAUSE_SECONDS", 0.001)
    started, now = 0, 0.0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now

    class Process(Ended):
        def wait(self, _seconds: float = 0) -> int:
            nonlocal now
            if long_lives and started == 4:  # three that ended soon, and then this one
                now += serving.LONG_SECONDS
            return 1

    def start(page: Page) -> Any:
        nonlocal started
        started += 1
        page._process = Process()  # type: ignore[assignment]
        return page._process

    monkeypatch.setattr(serving, "time", Clock)

    async def work(_page: Page, said: list[str]) -> None:
        await until(lambda: bool(said))
        assert "ended 4 times" in said[0]

    asyncio.run(with_page(tmp_path, start, work))
    assert started == starts


def test_a_page_that_ends_at_once_is_not_begun_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        if seconds >= 1:
            pauses.append(seconds)
        await sleep(min(seconds, 0.01))

    monkeypatch.setattr(asyncio, "sleep", noted)

    def start(page: Page) -> Any:
        page._process = Ended()  # type: ignore[assignment]
        return page._process

    async def work(_page: Page, said: list[str]) -> None:
        await until(lambda: bool(said))

    asyncio.run(with_page(tmp_path, start, work))
    assert pauses == [1, 3, 9]


def test_a_resumed_run_goes_on_without_a_page_whose_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {
            "run": {"name": "mine", "directory": str(tmp_path)},
            "monitoring": {"web": {"port": taken.getsockname()[1]}},
        }
        config = parse_config(values, source="the test")
        directory = RunDirectory.create(config, resume=False, clean=False)
        said: list[str] = []

        async def open_it() -> None:
            async with AsyncExitStack() as closing:
                records = ProcessRecords(directory.path)
                page = open_page(config, directory, records, said.append, closing)
                await page.close()

        with pytest.raises(UserError, match=r"monitoring\.web\.port"):
            asyncio.run(open_it())
        directory.state.start = 7
        asyncio.run(open_it())
        directory.close()
    assert len(said) == 1
    assert said[0].endswith("The run is resumed without a web page")
    assert directory.state.web == ""
