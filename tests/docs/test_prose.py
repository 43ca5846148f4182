"""Habits of writing that STYLE.md names become rarer and never more frequent (docs/prose.py)."""

import importlib.util
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def _prose():
    spec = importlib.util.spec_from_file_location("prose", DOCS / "prose.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["prose"] = module
    spec.loader.exec_module(module)
    return module


prose = _prose()


def test_each_habit_is_found():
    source = (
        'def f():\n    """Whether it is told meanwhile."""\n'
        'def g():\n    """Of somebody of its own: so many. Long because it is no use."""\n'
    )
    assert set(prose.habits_of(source)) == set(prose.counted())


def test_good_sentences_are_not_counted():
    source = '"""Return the tokens that are no longer used."""\nx = "not a number"\n'
    assert list(prose.habits_of(source)) == []


def test_no_habit_has_become_more_frequent():
    allowed, counts = prose.allowed(), prose.counted()
    assert allowed.keys() == counts.keys()
    risen = {
        name: (count, allowed[name]) for name, count in counts.items() if count > allowed[name]
    }
    assert not risen, f"more than docs/prose.json allows (count, allowed): {risen}; rewrite them"
