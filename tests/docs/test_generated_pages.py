"""The pages that are made from the code agree with it."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_generated_pages_are_current() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert len(pages["PAGES"]) == 3
    assert list(pages["stale"]()) == [], "run: python docs/generate.py"
