"""Functions of notebooks reach worker processes by name or as text, never as objects."""

from __future__ import annotations

import functools
import json as js
import linecache
import re
import textwrap
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import RewardError
from asyncrl.rewards.functions import exact_match
from asyncrl.user_code.source_text import importable_name, source_text

NOTEBOOK = """
import functools
import json as js
import os
import re
import xml.etree.ElementTree
from collections import Counter
from typing import Any

WORDS = ("yes", {"no": [1.5, None]})
NUMBER = re.compile("[0-9]+", re.ASCII)
MODEL = object()
MissingInWorkers = dict[str, Any]

def doubled(function):
    @functools.wraps(function)
    def twice(*given):
        return 2 * function(*given)
    return twice

def deep(levels):
    return deep(levels - 1) if levels else len(WORDS)

also = deep

class Counted(Counter):
    start = WORDS[0]

@doubled
def score(prompt: str, response: str, example: MissingInWorkers, *, best=WORDS) -> float:
    MODEL = js.loads("3")  # its own name, not the notebook's
    assert xml.etree.ElementTree.fromstring("<a/>").tag == "a"
    assert os.path.basename("a/b") == "b"
    assert Counted("yes")["y"] == 1 and Counted.start == "yes" and best[1]["no"] == [1.5, None]
    return MODEL + also(2) + sum(int(one) for one in NUMBER.findall(response))
"""


def cell(text: str, **names: Any) -> dict[str, Any]:
    """The names of a notebook after this cell; its lines are known as IPython makes them known."""
    place = f"<cell {abs(hash(text))}>"
    linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
    names = {"__name__": "__main__", **names}
    exec(compile(text, place, "exec"), names)  # noqa: S102 - of this test
    return names


def loaded(function: Any) -> dict[str, Any]:
    """The names of the module that workers get."""
    names: dict[str, Any] = {"__name__": "worker"}
    exec(source_text(function), names)  # noqa: S102 - of this test
    return names


def test_a_function_takes_along_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    names = cell(NOTEBOOK)
    # Python before 3.13 knows the text of a class only by the file of its module.
    main = types.ModuleType("__main__")
    vars(main).update(names, __file__=names["score"].__wrapped__.__code__.co_filename)
    monkeypatch.setitem(__import__("sys").modules, "__main__", main)
    there = loaded(names["score"])
    assert there["score"]("", "4 and 5", {}) == names["score"]("", "4 and 5", {}) == 2 * (3 + 2 + 9)
    assert "MODEL" not in there
    assert there["NUMBER"].flags & re.ASCII


@pytest.mark.parametrize(
    ("reads", "said"),
    [
        ("MODEL", r"reward 'score' reads 'MODEL', an object of type object"),
        ("sum(SECRET for _ in prompt)", r"reward 'score' reads 'SECRET', an object of type object"),
        ("undefined", r"reward 'score' reads 'undefined', which is not defined"),
    ],
)
def test_what_is_no_text_is_refused_by_its_name(reads: str, said: str) -> None:
    text = f"def score(prompt, response, example):\n    return {reads}\n"
    names = cell(text, MODEL=object(), SECRET=object())
    with pytest.raises(RewardError, match=said):
        source_text(names["score"])


def test_a_closure_is_refused_with_the_captured_name() -> None:
    threshold = 3

    def score(prompt: str, response: str, example: Any) -> float:
        return float(len(response) > threshold)

    def passes(prompt: str, response: str, example: Any) -> float:
        return score(prompt, response, example)

    with pytest.raises(RewardError, match=r"reward 'score' captures 'threshold' of the function"):
        source_text(score)
    with pytest.raises(RewardError, match="reward 'passes' captures 'score'"):
        source_text(passes)


def test_an_inner_function_without_captures_is_text() -> None:
    def length(prompt: str, response: str, example: Any) -> float:
        return float(len(textwrap.dedent(response)) + len(js.dumps(Counter("a"))))

    assert importable_name(length) is None
    assert loaded(length)["length"]("", "  bc", {}) == 2 + len('{"a": 1}')


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda prompt, response, example: 1.0, "write the lambda as `def name"),
        (3, "3 is not a function"),
        (functools.partial(exact_match, ignore_case=True), "is not a function"),
        ("text".startswith, "is not a function"),
    ],
)
def test_what_has_no_text_is_refused(given: Any, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        source_text(given)


def test_modules_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert importable_name(exact_match) == "asyncrl.rewards.functions:exact_match"
    (tmp_path / "my_rewards_of_a_file.py").write_text("def score(p, r, e):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_rewards_of_a_file as own  # type: ignore[import-not-found]

    assert importable_name(own.score) == f"{tmp_path / 'my_rewards_of_a_file.py'}:score"
    # The notebook's own function imports it.
    names = cell(
        textwrap.dedent("def judge(p, r, e):\n    return inner(p, r, e)\n"), inner=own.score
    )
    assert "from my_rewards_of_a_file import score as inner" in source_text(names["judge"])
