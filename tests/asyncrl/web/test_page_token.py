"""What the page does with the token, in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import chromium
import pytest
from asyncrl_runs import until
from needed_programs import needs
from served_page import FakeRun, serving
from synthetic_run import make_run

from asyncrl.web import server
from asyncrl.web.guard import Policy
from asyncrl.wire.messages import control

pytestmark = needs("chromium")
TOKEN = "100%-of-a-token&more"


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> list[server.Server]:
    """The server, whose `should_exit` ends it as the end of a run does."""
    made: list[server.Server] = []

    class EndedByTheTest(server.Server):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(server, "Server", EndedByTheTest)
    return made


@pytest.mark.parametrize("is_loopback", [True, False])
def test_the_token_goes_where_it_is_needed_and_is_forgotten_at_the_end(
    tmp_path: Path, ending: list[server.Server], is_loopback: bool
) -> None:
    """Who takes the port of a run that has ended must not be sent its token."""
    run, source = make_run(tmp_path / "run", steps=3), FakeRun()
    seen: list[tuple[str, str | None]] = []
    with (
        serving(run, source, Policy(is_loopback=is_loopback, token=TOKEN)) as client,
        chromium.browsing() as page,
    ):
        page.on("request", lambda one: seen.append((one.method, one.headers.get("authorization"))))
        page.goto(f"http://127.0.0.1:{client.port}/#token={quote(TOKEN, safe='')}")
        page.wait_for_selector("#link[data-state=live]")
        page.wait_for_selector("[data-section=learning] svg path")
        page.click("button[data-order=pause]")
        until(lambda: bool(source.orders), seconds=60, what="the order")
        assert page.evaluate("sessionStorage.getItem('token')") == TOKEN
        ending[0].should_exit = True
        until(
            lambda: page.evaluate("sessionStorage.getItem('token')") is None,
            seconds=60,
            what="the token to be forgotten",
        )
        assert "ended" in page.inner_text("#link") or "not connected" in page.inner_text("#link")
    assert source.orders == [control.PauseRequest()]
    bearer = f"Bearer {TOKEN}"
    assert [authorization for method, authorization in seen if method == "POST"] == [bearer]
    read = {authorization for method, authorization in seen if method == "GET"}
    assert read == ({None} if is_loopback else {None, bearer})
