"""Shared by the tests of monitoring."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """The module that makes up run directories."""
    path = Path(__file__).with_name("synthetic_run.py")
    spec = importlib.util.spec_from_file_location("synthetic_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
