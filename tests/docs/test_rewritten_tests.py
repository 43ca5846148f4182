"""What `rewritten_tests` writes is what pytest reads."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import rewritten_tests
from _pytest.assertion import rewrite


def test_pytest_reads_it_and_rewrites_nothing(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "test_one.py"
    file.write_text("def test_one(value):\n    assert value == 2\n", encoding="utf-8")
    rewritten_tests.write([file], pytestconfig)

    def refuse(*_: object) -> None:
        raise AssertionError("it was rewritten again")

    monkeypatch.setattr(rewrite, "_rewrite_test", refuse)
    hook: Any = pytestconfig.stash[rewrite.assertstate_key].hook
    spec = importlib.util.spec_from_file_location("test_one", file, loader=hook)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    hook.exec_module(module)
    with pytest.raises(AssertionError, match="assert 3 == 2"):
        module.test_one(3)
