"""Blocks of Python in pages do what their page says."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from shown_commands import PAGES, ROOT, blocks

from asyncrl.trainer.base.config import TrainerConfig

Names = dict[str, Any]

ALL = [(path.name, block) for path in PAGES for block in blocks(path, "python")]


def above_mean(names: Names) -> None:
    kind = names["AboveMean"]
    assert kind.compares_samples
    own = kind.from_config(TrainerConfig())
    advantages = own.advantages(np.array([0.0, 1.0, 1.0, 0.0]))
    assert advantages.min() == 0 < advantages.max()


def two_digits(names: Names) -> None:
    own = runpy.run_path(str(ROOT / "examples" / "your_own" / "my_map.py"))["two_digits"]
    for row in ({"question": "a", "reference": "12"}, {"question": "a", "reference": "123"}):
        assert names["two_digits"](row) == own(row)


def polite(names: Names) -> None:
    said = {"conversations": [[{"role": "user", "content": "yes please"}], []]}
    assert names["polite"]("", "", said) == 1.0


def score_of_trl(names: Names) -> None:
    assert names["score"]("", "it is 5", {"answer": "5"}) == 1.0


def compiled(names: Names) -> None:
    assert names["score"]("", "int main(void) { return 0; }", {}) == 1.0
    assert names["score"]("", "no program", {}) == 0.0


def add(names: Names) -> None:
    assert names["add"](2, 3) == 5


DOES: dict[str, Callable[[Names], None] | str] = {
    "from asyncrl import Run": "tests/asyncrl/run/test_python_run.py runs it",
    "class AboveMean": above_mean,
    "class Hunt": "test_the_hunt_of_the_page plays it",
    "def play(row, client)": "test_the_hunt_of_the_page plays it",
    "def step(self, action):\n    if self.asks_an_expert": "a part of a class",
    "def polite": polite,
    "def add": add,
    "def solve(row, client) -> float": "shortened; runs have examples/agent_openai.py",
    "def score(completions": score_of_trl,
    "from asyncrl.sandbox": compiled,
    "def two_digits": two_digits,
    "def digits_please": "a signature; the function is in examples/your_own/my_rewards.py",
}
"""What is asserted of a block that holds these words, or why nothing is."""


def test_each_block_has_an_entry_and_each_entry_a_block() -> None:
    of_blocks = [[words for words in DOES if words in block] for _, block in ALL]
    assert sorted(of_blocks) == sorted([words] for words in DOES)


@pytest.mark.parametrize(
    ("page", "block"), ALL, ids=[f"{page}-{i}" for i, (page, _) in enumerate(ALL)]
)
def test_a_block_does_what_it_says(page: str, block: str) -> None:
    code = compile(block, page, "exec")
    check = next(one for words, one in DOES.items() if words in block)
    if isinstance(check, str) and check.endswith(" runs it"):
        return
    names: Names = {"Any": Any}
    exec(code, names)  # noqa: S102 - of our pages
    if not isinstance(check, str):
        check(names)
