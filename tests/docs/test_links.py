"""Paths and commands that the pages name exist."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from each_one import each_one
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


def missing_from(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        if "://" not in target and not (page.parent / target).exists():
            yield target
    if page.name != "CHANGELOG.md":  # it names what is no longer there
        yield from (path for path in PATH.findall(text) if not (ROOT / path).exists())
    for name in MODULE.findall(text):
        if importlib.util.find_spec(name.rstrip(".")) is None:
            yield name


def test_what_a_page_names_exists() -> None:
    missing = [(page, name) for page in PAGES for name in missing_from(page)]
    assert [one for one in missing if not re.search("NNNN|NAME", one[1])] == []


def test_each_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    """A `|` in code ends a cell unless it is escaped."""
    with each_one() as checking:
        for page in PAGES:
            text = FENCE.sub("", page.read_text(encoding="utf-8"))
            for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
                head, *rows = (len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines())
                with checking(page):
                    assert set(rows) == {head}, table
