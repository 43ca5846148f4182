"""docs/algorithms.md has every algorithm and every correction, with its defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from asyncrl.trainer.base.algorithm_registry import known_algorithms
from asyncrl.trainer.base.config import TrainerConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, list[str]]:
    """The further cells of the first table under this heading, by the name in the first one."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n\n## ")[0]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table is not None
    cells = [line.strip("|").split(" | ") for line in table[0].splitlines()[2:]]
    found = {re.findall("`([a-z_]+)`", first)[0]: rest for first, *rest in cells}
    assert len(found) == len(cells)
    return found


def test_every_algorithm_is_there_with_its_equation_source_and_default() -> None:
    table = rows("Algorithms")
    assert set(table) == set(known_algorithms())
    for name, (advantage, loss, normalization, source, when) in table.items():
        assert normalization.strip("`") == TrainerConfig(algorithm=name).loss_normalization
        assert re.search(r"\d{4}\.\d{5}", source), name
        assert all((advantage, loss, when.strip())), name


def test_every_correction_is_there_and_the_defaults_are_named() -> None:
    table = rows("Corrections")
    assert set(table) == set(get_args(TrainerConfig.model_fields["correction"].annotation))
    defaults = {name: TrainerConfig(algorithm=name).correction for name in known_algorithms()}
    usual = TrainerConfig().correction
    assert f"| `{usual}` (default) |" in PAGE
    for name, correction in defaults.items():
        if correction != usual:
            assert f"| `{correction}` (default of `{name}`) |" in PAGE
