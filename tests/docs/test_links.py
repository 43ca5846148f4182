"""Paths and commands that the pages name exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from shown_commands import FENCE

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = (
    "asyncrl|benchmarks|cache|docker|docs|engine|examples|monitoring|rollout|scheduler|tests|trainer"
    "|wire"
)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")
MODULE = re.compile(r"python -m ((?:asyncrl|benchmarks)[\w.]*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    missing = [
        target
        for target in LINK.findall(text)
        if "://" not in target and not (page.parent / target).exists()
    ]
    if page.name != "CHANGELOG.md":  # it names what is no longer there
        missing += [path for path in PATH.findall(text) if not (ROOT / path).exists()]
    missing += [
        name for name in MODULE.findall(text) if importlib.util.find_spec(name.rstrip(".")) is None
    ]
    assert [name for name in missing if not re.search("NNNN|NAME", name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_row_of_a_table_has_as_many_cells_as_its_head(page: Path) -> None:
    """A `|` in code ends a cell unless it is escaped."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, *rows = (len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines())
        assert set(rows) == {head}, table
