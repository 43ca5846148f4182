"""Rewrite the assertions of all tests as pytest does, which its workers then read.

    python tests/support/rewritten_tests.py

No test is imported, so this takes a fraction of what `pytest --collect-only` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from _pytest.config import get_config

_TESTS = Path(__file__).parents[1]


def write(files: Iterable[Path], config: pytest.Config) -> None:
    """Write what pytest compiles these tests to, if what it has is not of their present text.

    Args:
        files: the tests. Raises SyntaxError for what is not Python.
        config: pytest's.
    """
    state = config.stash[rewrite.assertstate_key]
    for file in files:
        folder = rewrite.get_cache_dir(file)
        compiled = folder / (file.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, compiled) is not None:
            continue
        folder.mkdir(exist_ok=True)
        status, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(state, code, status, compiled)


def main() -> None:
    """Rewrite all tests."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    config = get_config()
    config.parse(["--noconftest", str(_TESTS)])
    named = ("test_*.py", "conftest.py")
    write((file for name in named for file in sorted(_TESTS.rglob(name))), config)


if __name__ == "__main__":
    main()
