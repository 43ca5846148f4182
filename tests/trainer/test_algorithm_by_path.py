"""A user's class is found by the name in `trainer.algorithm`, tried before a run, and trained."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.errors import UserError
from asyncrl.startup.model_checks import check_algorithm
from asyncrl.startup.startup_summary import training_line
from asyncrl.trainer.algorithms.corrections import make
from asyncrl.trainer_process.custom_algorithm import try_own_algorithm

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
EXAMPLE = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
NAME = "my_algorithm.py:AboveMean"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's example, in which a run is started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_algorithm.py").write_text(EXAMPLE)
    return tmp_path


def config(name: str = NAME, **scheduler: Any) -> RunConfig:
    return parse_config({"trainer": {"algorithm": name}, "scheduler": scheduler}, source="test")


@pytest.mark.parametrize("name", [NAME, "my_algorithm:AboveMean"])
def test_the_example_of_the_page_is_an_algorithm(here: Path, name: str) -> None:
    del here
    found = config(name, dynamic_sampling={"enabled": True})
    try_own_algorithm(
        found
    )  # in a process of its own where a run trains with it (`test_end_to_end`)
    got = make(found.trainer).advantages(np.array([0.0, 1.0, 1.0, 0.0]))
    assert (got > 0).tolist() == [False, True, True, False]
    assert "your own algorithm" in training_line(found)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no 'AboveMean'"),
        ("def AboveMean(): ...", "lacks from_config"),
        ("import nowhere", "cannot be loaded"),
        (EXAMPLE.replace("compares_samples", "other"), "Set `compares_samples = True`"),
        (EXAMPLE.replace(".clip(min=0)", " + 1"), "equal rewards are not all 0"),
        (EXAMPLE.replace(".clip(min=0)", "[1:]"), "must be 8 finite numbers"),
        (EXAMPLE.replace("super()", "self.nothing"), "failed its trial"),
    ],
)
def test_what_is_no_algorithm_is_refused(here: Path, text: str, reason: str) -> None:
    (here / "mine.py").write_text(text)
    name = "mine.py:AboveMean"
    with pytest.raises(UserError, match=re.escape(reason)):
        try_own_algorithm(config(name, dynamic_sampling={"enabled": True}))


@pytest.mark.usefixtures("_forked_runs")
def test_a_process_of_its_own_says_why(here: Path) -> None:
    (here / "broken.py").write_text("print('hello')\nraise SystemExit(3)")
    with pytest.raises(UserError, match=r"broken.py ends the process when it is") as refused:
        check_algorithm(config("broken.py:Mine"))
    assert "importlib" not in str(refused.value), "frames that are not the user's"


def test_a_file_that_is_not_there_is_named(here: Path) -> None:
    del here
    with pytest.raises(UserError, match=r"there is no file nowhere\.py"):
        try_own_algorithm(config("nowhere.py:Mine"))
