"""Checks of many names in one test, which fails with all names that are wrong.

with each_one() as checking:
    for name in names:
        with checking(name):
            assert is_right(name)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


@contextmanager
def each_one() -> Iterator[Callable[[object], AbstractContextManager[None]]]:
    """Raise AssertionError at the end that has each failure with its name."""
    failures: list[str] = []

    @contextmanager
    def checking(name: object) -> Iterator[None]:
        try:
            yield
        except (AssertionError, pytest.fail.Exception) as error:
            failures.append(f"{name}: {error}")

    yield checking
    if failures:
        raise AssertionError("\n".join([f"{len(failures)} are wrong:", *failures]))
