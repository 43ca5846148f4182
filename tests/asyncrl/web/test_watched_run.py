"""A real run that is watched and steered through its page: API, browser, kills."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import chromium
import pytest
from asyncrl_runs import ROOT, UNHURRIED, CommandLine, until
from synthetic_run import make_run

from asyncrl.errors import UserError
from asyncrl.run.control import ask
from asyncrl.run.directory import read_state
from asyncrl.web.command import show_page
from monitoring.wording import count, number, percent
from wire.messages import control

pytestmark = pytest.mark.slow


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=100) as reply:  # noqa: S310
        return json.load(reply)


@dataclass(frozen=True)
class Watched:
    """An active run, and its page."""

    command_line: CommandLine

    @property
    def url(self) -> str:
        state = read_state(self.command_line.folder)
        return "" if state is None else state.web

    @property
    def token(self) -> str:
        return (self.command_line.folder / "web.token").read_text().strip()

    @property
    def link(self) -> str:
        """What `asyncrl web` prints."""
        said: list[str] = []
        show_page(self.command_line.folder, 0, said.append)
        return said[0]

    def get(self, path: str) -> Any:
        return _get(self.url + path)

    def processes(self) -> list[int]:
        """Process ids of the run's web process: one or none."""
        folder = str(self.command_line.folder).encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                command = path.read_bytes()
                if b"asyncrl.web.process" in command and folder in command:
                    found.append(int(path.parent.name))
        return found


@pytest.fixture
def watched(command_line: CommandLine) -> Watched:
    command_line.start(run__steps=100_000, monitoring__live="plain", rewards__functions=UNHURRIED)
    until(lambda: command_line.steps() >= 3, seconds=200, what="three steps")
    return Watched(command_line)


def test_a_run_is_watched_and_steered_and_survives_kills_of_its_page(watched: Watched) -> None:
    assert watched.processes() == [], "nobody has looked yet"
    lines = watched.get("/api/metrics?from=1&limit=2")
    assert [line["step"] for line in lines] == [1, 2]
    (process,) = watched.processes()
    command = Path(f"/proc/{process}/cmdline").read_bytes()
    environment = Path(f"/proc/{process}/environ").read_bytes()
    assert watched.token.encode() not in command + environment
    assert os.getpriority(os.PRIO_PROCESS, process) >= 10
    assert watched.get("/api/processes").keys() >= {"trainer", "generator-0"}
    assert set(watched.get("/api/timeline")) >= {"trainer", "generator-0"}

    if chromium.PATH is not None:  # `make test` says that this is not run
        _browse(watched)

    steps = watched.command_line.steps()
    os.kill(process, signal.SIGKILL)
    address = (urlsplit(watched.url).hostname, urlsplit(watched.url).port)
    assert watched.get("/api/status")["run"] == "your-own", "the same address"
    until(lambda: watched.command_line.steps() > steps, seconds=100, what="training")
    for _ in range(3):
        with contextlib.suppress(ConnectionError), socket.create_connection(address):
            until(watched.processes, seconds=100, what="a process of the page")
            (process,) = watched.processes()
            os.kill(process, signal.SIGKILL)
            until(lambda old=process: old not in watched.processes(), seconds=60, what="its end")
    until(lambda: not watched.url, seconds=60, what="the page to be given up")
    with pytest.raises(UserError, match="has no web page"):
        _ = watched.link
    ask(watched.command_line.folder, control.StopRequest())
    run = watched.command_line.started[0]
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert output.count("the process of the web page ended 4 times") == 1
    assert (
        watched.command_line.folder.joinpath("logs", "web.log").read_text().count("order pause")
        <= 1
    )
    for name in ("logs/web.log", "run.json", "config.yaml", "processes.jsonl"):
        assert watched.token not in watched.command_line.folder.joinpath(name).read_text()
    assert watched.token not in output
    assert watched.processes() == []


def _browse(watched: Watched) -> None:
    """Numbers on the page are the API's; a button's order arrives."""
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


def _compare(page: Any, watched: Watched) -> None:
    """While the run is paused, after its last step: every number on the page against the API's."""

    def on_page() -> dict[str, str]:
        shown = {key: page.inner_text(f"[data-key={key}]") for key in _FORMATS}
        shown["accuracy"] = page.inner_text("[data-key=accuracy]")
        shown["step"] = re.findall(r"step (\d+) of", page.inner_text("#extent"))[0]
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


def test_an_ended_run_is_shown_until_ctrl_c(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "done", steps=5)
    command = [sys.executable, "-m", "asyncrl", "web", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        assert _get(url + "/api/status")["step"] == 5
        request = urllib.request.Request(  # noqa: S310
            url + "/api/orders/stop", b"{}", {"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError, match="409"):
            urllib.request.urlopen(request, timeout=60)  # noqa: S310
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
