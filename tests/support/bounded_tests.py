"""A test that waits for ever fails, names where it waited, and leaves its worker to the others.

A plugin of pytest (tests/conftest.py). `--longest SECONDS` bounds the set-up, the call and the
tear-down of a test each. What waits afterwards, in clean-up, is interrupted too, again and again.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Generator
from typing import Any

import pytest

_LONGEST = 480.0
"""Seconds; three times what the longest test takes beside two busy processes."""
_CROWDED = 3.0
"""Processes that wait for each core: a test gets its time again, `_EXTENSIONS` times."""
_EXTENSIONS = 2
_AGAIN = 1 / 16
"""Of the longest time: until clean-up is interrupted."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--longest", type=float, default=_LONGEST, help="seconds of one test")


def pytest_configure() -> None:
    # A child that was forked has an alarm of its own (asyncrl.child).
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGALRM, signal.SIG_DFL))


def _bounded(item: pytest.Item) -> Generator[None, Any, Any]:
    if threading.current_thread() is not threading.main_thread():
        return (yield)
    longest: float = item.config.getoption("longest")

    extensions = itertools.count()

    def interrupt(*_: object) -> None:
        if os.getloadavg()[0] > _CROWDED * (os.cpu_count() or 1) and next(extensions) < _EXTENSIONS:
            signal.setitimer(signal.ITIMER_REAL, longest, longest * _AGAIN)
            return
        pytest.fail(f"it has not ended within {longest:.0f} s (tests/support/bounded_tests.py)")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, longest, longest * _AGAIN)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _bounded(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _bounded(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from _bounded(item))
