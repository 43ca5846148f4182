"""The site is built without a warning, links included, and asks no other host for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = (
    re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\s\"'>]*"),
    re.compile(r"<link\b[^>]*\bhref=[\"']?(?:https?:)?//[^\s\"'>]*"),
    re.compile(r"(?:@import\s+(?:url\()?|url\()[\"']?(?:https?:)?//[^\s\"')]*"),
)
"""What makes a browser fetch from another host. Links that a reader may follow are none."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", place],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_every_page_is_on_the_site(site: Path) -> None:
    docs = ROOT / "docs"
    pages = [path.relative_to(docs) for path in docs.rglob("*.md") if path.name != "README.md"]
    assert len(pages) > 50
    assert [page for page in pages if not (site / page).with_suffix(".html").is_file()] == []
    assert "Two commands" in (site / "index.html").read_text(encoding="utf-8"), "the README"


def test_the_site_needs_no_other_host(site: Path) -> None:
    pages = [path for kind in ("html", "css") for path in site.rglob(f"*.{kind}")]
    assert len(pages) > 50
    found = {
        match[0]
        for path in pages
        for pattern in OUTSIDE
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == set()
