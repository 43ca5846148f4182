"""The system's Chromium without a screen, driven by playwright."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from needed_programs import path_of


@contextlib.contextmanager
def browsing(**context: Any) -> Iterator[Any]:
    """A new page of a browser; it fails the test if the page has an error or loads from elsewhere.

    Args:
        context: as for playwright's `Browser.new_context`, such as `viewport`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from playwright.sync_api import sync_playwright

    errors: list[str] = []
    hosts: set[str] = set()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path_of("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_context(**context).new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console", lambda said: errors.append(said.text) if _is_refusal(said.text) else None
        )
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.set_default_timeout(120_000)
        yield page
        browser.close()
    assert not errors, errors
    assert len(hosts - {""}) <= 1, f"the page asked several sites: {hosts}"


def _is_refusal(text: str) -> bool:
    """Whether the browser says that the page's own policy forbids something."""
    return "Content Security Policy" in text
