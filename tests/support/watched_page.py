"""The page of a real run: API, browser, kills. A test begins and ends the run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import chromium
import pytest
from asyncrl_runs import CommandLine, until

from asyncrl.errors import UserError
from asyncrl.monitoring.terminal.formatting import count, number, percent
from asyncrl.runs.directory import read_state
from asyncrl.web.command import show_page


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=100) as reply:  # noqa: S310
        return json.load(reply)


@dataclass(frozen=True)
class RunPage:
    """An active run, and its page."""

    run: CommandLine

    @property
    def url(self) -> str:
        state = read_state(self.run.folder)
        return "" if state is None else state.web

    @property
    def token(self) -> str:
        return (self.run.folder / "web.token").read_text().strip()

    @property
    def link(self) -> str:
        """What `asyncrl web` prints."""
        said: list[str] = []
        show_page(self.run.folder, 0, said.append)
        return said[0]

    def get(self, path: str) -> Any:
        return _get(self.url + path)

    def processes(self) -> list[int]:
        """Process ids of the run's web process: one or none."""
        folder = str(self.run.folder).encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                command = path.read_bytes()
                if b"asyncrl.web.process" in command and folder in command:
                    found.append(int(path.parent.name))
        return found


def is_watched(page: RunPage) -> None:
    """By its API; the first request starts the page's process."""
    page.run.phase("it is watched through its page")
    lines = page.get("/api/metrics?from=1&limit=2")
    assert [line["step"] for line in lines] == [1, 2]
    (process,) = page.processes()
    command = Path(f"/proc/{process}/cmdline").read_bytes()
    environment = Path(f"/proc/{process}/environ").read_bytes()
    assert page.token.encode() not in command + environment
    assert os.getpriority(os.PRIO_PROCESS, process) >= 10
    assert page.get("/api/processes").keys() >= {"trainer", "generator-0"}
    assert set(page.get("/api/timeline")) >= {"trainer", "generator-0"}


def survives_kills_of_its_page(page: RunPage) -> None:
    """It trains meanwhile, and gives the page up after the fourth."""
    page.run.phase("its page is killed four times")
    steps = page.run.steps()
    (process,) = page.processes()
    os.kill(process, signal.SIGKILL)
    address = (urlsplit(page.url).hostname, urlsplit(page.url).port)
    assert page.get("/api/status")["run"] == page.run.name, "the same address"
    page.run.wait_for_steps(steps + 1)
    for _ in range(3):
        with contextlib.suppress(ConnectionError), socket.create_connection(address):
            until(page.processes, seconds=100, what="a process of the page")
            (process,) = page.processes()
            os.kill(process, signal.SIGKILL)
            until(lambda old=process: old not in page.processes(), seconds=60, what="its end")
    until(lambda: not page.url, seconds=60, what="the page to be given up")
    with pytest.raises(UserError, match="has no web page"):
        _ = page.link


def the_page_has_ended(page: RunPage, output: str) -> None:
    """With the run. No file and no output has its token.

    Args:
        page: of the run.
        output: all of the run's.
    """
    folder = page.run.folder
    assert output.count("the process of the web page ended 4 times") == 1
    assert folder.joinpath("logs", "web.log").read_text().count("order pause") <= 1
    for name in ("logs/web.log", "run.json", "config.yaml", "processes.jsonl"):
        assert page.token not in folder.joinpath(name).read_text()
    assert page.token not in output
    assert page.processes() == []


def is_steered(watched: RunPage) -> None:
    """In a browser. Numbers on the page are the API's; a button's order arrives."""
    watched.run.phase("it is steered in a browser")
    with chromium.browsing(viewport={"width": 390, "height": 844}) as page:
        page.goto(watched.link)
        page.wait_for_selector("#link[data-state=live]")
        assert watched.token not in page.url
        page.click("button[data-order=pause]")
        _until_page_says(page, "#answer", "pause: the generators pause")
        _until_page_says(page, "#waiting", "the run is paused")
        _compare(page, watched)
        page.wait_for_selector("[data-section=learning] svg path")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, "it does not scroll sideways on a phone"
        page.click("button[data-order=resume]")
        _until_page_says(page, "#answer", "resume: the generators continue")
        page.click("button[data-order=stop]")
        assert page.inner_text("#question") == "Stop the run?"
        page.keyboard.press("Enter")  # "Cancel" has the focus
        _until_page_says(page, "#answer", "stop: cancelled")
        page.goto(watched.url + "/docs")
        assert "POST /api/orders/scale" in page.inner_text("main")
        page.evaluate("sessionStorage.clear()")
        page.goto(watched.url)
        page.wait_for_selector("#locked", state="visible")
        assert not page.is_visible("#controls"), "no buttons without the token"
    assert watched.get("/api/status")["phase"] == "training", "nothing was stopped"


def _until_page_says(page: Any, place: str, words: str) -> None:
    # Not by `wait_for_function`: the page's policy forbids scripts made from text.
    until(lambda: words in page.inner_text(place), seconds=120, what=f"{words!r} at {place}")


_FORMATS = {
    "reward_mean": lambda value: number(value, 3),
    "tokens_per_second": count,
    "staleness_mean": number,
    "generator_idle": percent,
    "trainer_idle": percent,
    "drafted_share": percent,
    "draft_acceptance": percent,
    "groups_trained": count,
    "groups_in_flight": count,
    "groups_failed": count,
    "samples_running": count,
    "samples_held": count,
    "samples_queued": count,
}


def _compare(page: Any, watched: RunPage) -> None:
    """While the run is paused, after its last step: every number on the page against the API's."""

    def on_page() -> dict[str, str]:
        shown = {key: page.inner_text(f"[data-key={key}]") for key in _FORMATS}
        shown["accuracy"] = page.inner_text("[data-key=accuracy]")
        shown["step"] = re.findall(r"(\d+) of \d+ steps", page.inner_text("#extent"))[0]
        return shown

    def by_api() -> dict[str, str]:
        status = watched.get("/api/status")
        expected = {key: form(status[key]) for key, form in _FORMATS.items()}
        expected["accuracy"] = percent(status["accuracy_before"], 1)
        expected["step"] = str(status["step"])
        last = watched.get("/api/metrics")[-1]  # of the step that the status will soon be of
        expected["reward_mean"] = number(last["learning"]["reward_mean"], 3)
        return expected

    until(lambda: on_page() == by_api(), seconds=60, what="the page to show what the API says")
    rows = page.eval_on_selector_all(
        "#rows tr", "rows => rows.map(row => row.innerText.split('\\t'))"
    )
    told = watched.get("/api/processes")
    assert {row[0]: row[1] for row in rows} == {name: one["state"] for name, one in told.items()}
