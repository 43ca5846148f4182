"""Settings that pages name exist, most of all those next to which a page puts other projects'."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from shown_commands import blocks

from asyncrl.config.reference import sections
from asyncrl.config.run_config import RunConfig, parse_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
SIDE_BY_SIDE = ("migrating.md",)
KEYS = {f"{section.path}.{setting.name}" for section in sections() for setting in section.settings}
ALL = KEYS | {section.path for section in sections()}
"""Dotted paths of settings, and of sections."""
SECTIONS = "|".join(sorted({key.partition(".")[0] for key in KEYS}))
NAMED = re.compile(rf"`((?:{SECTIONS})\.[a-z_][a-z0-9_.\[\]]*)(?:: [^`]*|=[^`]*)?`")
"""`section.key`, `section.key: value` or `section.key=value`."""


def is_file_or_code(name: str) -> bool:
    """Whether it is no setting: a file (`run.yaml`), a module, or a name in a module."""
    path = ROOT / name.replace(".", "/")
    files = ("log", "py", "json", "jsonl", "token", "md", "yaml", "key")
    return (
        path.is_dir()
        or path.with_suffix(".py").is_file()
        or path.parent.with_suffix(".py").is_file()
        or name.rpartition(".")[2] in files
        or name == "model.load_weights"  # torch's
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_setting_that_a_page_names_exists(page: Path) -> None:
    named = set(NAMED.findall(page.read_text(encoding="utf-8")))
    if page.name in SIDE_BY_SIDE:
        return  # also has keys of other projects, see below
    assert sorted(name for name in named - ALL if not is_file_or_code(name)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_configuration_that_a_page_shows_is_accepted_as_it_stands(page: Path) -> None:
    for block in blocks(page, "yaml"):
        shown = yaml.safe_load(block)
        if isinstance(shown, dict) and shown.keys() <= RunConfig.model_fields.keys():
            parse_config(shown, source=page.name)


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_each_setting_next_to_another_projects_exists(name: str) -> None:
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in (ROOT / "docs" / name).read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    table = [cells for cells in rows if cells[1] != "asyncrl"]
    assert len(table) > 30
    assert all(len(cells) == 3 for cells in table)
    named = {
        key
        for _, ours, _ in table
        for key in re.findall(r"`([a-z_]+\.[a-z_.\[\]]+)(?:: [^`]*)?`", ours)
    }
    assert len(named) > 30
    assert named - KEYS == set()
