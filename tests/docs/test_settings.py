"""Settings that pages name exist, most of all those next to which a page puts other projects'."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml
from shown_commands import blocks

from asyncrl.config.reference import sections
from asyncrl.config.run_config import RunConfig, parse_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
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
    if page.name == "migrating.md":
        return  # also has keys of other projects, see below
    assert sorted(name for name in named - ALL if not is_file_or_code(name)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_configuration_that_a_page_shows_is_accepted_as_it_stands(page: Path) -> None:
    for block in blocks(page, "yaml"):
        shown = yaml.safe_load(block)
        if isinstance(shown, dict) and shown.keys() <= RunConfig.model_fields.keys():
            parse_config(shown, source=page.name)


MIGRATING = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
WITH_DEFAULT = re.compile(r"`([^`]+)`(?: \(`?([^()`]+)`?\))?")
"""A setting, and its default in parentheses."""


def rows_of(text: str) -> list[list[str]]:
    """The cells of the rows of all tables, without their heads."""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    assert all(len(cells) == 3 for cells in rows)
    return [cells for cells in rows if cells[1] != "asyncrl"]


def read(default: object) -> Any:
    """A default as a page writes it, or as a peer has it."""
    value = yaml.safe_load(str(default))
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def test_each_setting_next_to_another_projects_exists_with_its_default() -> None:
    table = rows_of(MIGRATING)
    assert len(table) > 30
    named = [
        (key.partition(":")[0], default)
        for _, ours, _ in table
        for key, default in WITH_DEFAULT.findall(ours)
        if "." in key
    ]
    assert len(named) > 30
    assert {key for key, _ in named} - KEYS == set()
    own = {
        f"{section.path}.{setting.name}": setting.default
        for section in sections()
        for setting in section.settings
    }
    wrong = [(key, own[key]) for key, said in named if said and read(said) != read(own[key])]
    assert wrong == []


@pytest.mark.peers
def test_the_defaults_of_trl() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trl = importlib.import_module("trl")
        asynchronous = importlib.import_module("trl.experimental.async_grpo").AsyncGRPOConfig
        others = {"stop", "prompt", "None", *inspect.signature(trl.GRPOTrainer).parameters}
    page = MIGRATING.partition("## From TRL")[2].partition("## From verl")[0]
    assert f"TRL {trl.__version__}" in page
    first, _, rest = page.partition("### Asynchronous training")
    middle, _, last = rest.partition("### Running")
    for text, config in ((first + last, trl.GRPOConfig), (middle, asynchronous)):
        fields = {field.name: field.default for field in dataclasses.fields(config)}
        for theirs, _, _ in rows_of(text):
            for key, default in WITH_DEFAULT.findall(theirs):
                if default:
                    value = fields[key]
                    assert read(default) == read(getattr(value, "value", value)), key
                elif key.isidentifier():
                    assert key in others | fields.keys()


@pytest.mark.peers
def test_the_defaults_of_verl() -> None:
    found = importlib.util.find_spec("verl")
    assert found is not None
    assert found.origin is not None
    place = Path(found.origin).parent
    assert f"verl {(place / 'version' / 'version').read_text().strip()}" in MIGRATING
    settings = yaml.safe_load(
        (place / "trainer" / "config" / "_generated_ppo_trainer.yaml").read_text(encoding="utf-8")
    )
    for theirs, _, _ in rows_of(MIGRATING.partition("## From verl")[2]):
        before = ""
        for key, default in WITH_DEFAULT.findall(theirs):
            whole = f"{before.rpartition('.')[0]}{key}" if key.startswith(".") else key
            before = whole
            if whole.partition(".")[0] not in settings:
                continue  # of `fully_async_policy`
            value = settings
            for part in whole.split("."):
                value = value[part]
            assert not default or read(default) == read(value), whole
