"""The examples in docstrings give what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("asyncrl", "engine", "trainer", "scheduler", "cache", "monitoring", "wire", "rollout")
MODULES = sorted(
    "asyncrl." + ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("asyncrl.")
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if " >>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_hold(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted
    assert not result.failed
