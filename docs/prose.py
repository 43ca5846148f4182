"""Count the habits of docstrings, comments and messages that a native engineer would not write.

    python docs/prose.py            # the counts beside what is allowed
    python docs/prose.py --lower    # allow no more than there are now (`make docs` does it)

`tests/docs/test_prose.py` fails when a count rises. The patterns are a guard and not a judge: a
text without any of them can still be bad.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = ROOT / "docs" / "prose.json"
PACKAGES = ("asyncrl", "cache", "engine", "monitoring", "rollout", "scheduler", "trainer", "wire")
FIRST_WORDS = {
    "begins with a preposition": re.compile(
        r"(?:About|After|Against|Along|Among|Around|As|At|Before|Behind|Below|Beside|Between|Beyond"
        r"|By|During|For|From|In|Inside|Into|Of|On|Over|Per|Since|Through|To|Toward|Under|Until"
        r"|Upon|With|Within|Without)\b"
    ),
    "begins with Whether, What, ...": re.compile(
        r"(?:How|What|When|Where|Whether|Which|Who|Whose|Why)\b"
    ),
}
"""The beginning of a docstring."""
HABITS = {
    "is no X": re.compile(
        r"\b(?:is|are|was|were|has|have|had) no (?!longer|more\b)", re.IGNORECASE
    ),
    "of its own": re.compile(r"\bof (?:its|their|one's) own\b", re.IGNORECASE),
    "whoever, somebody": re.compile(r"\b(?:whoever|whomever|somebody|nobody)\b", re.IGNORECASE),
    "meanwhile": re.compile(r"\bmeanwhile\b", re.IGNORECASE),
    "is told": re.compile(r"\b(?:is|are|was|were) told\b", re.IGNORECASE),
    "so many": re.compile(r"\bso many\b", re.IGNORECASE),
    "Long because": re.compile(r"\bLong because\b"),
}
"""Anywhere in a docstring or in a text of the program."""


def docstrings_and_texts(source: str) -> tuple[list[str], list[str]]:
    """The docstrings of a module (of attributes too), and its other constant texts."""
    tree = ast.parse(source)
    own: set[int] = set()
    docstrings = []
    for node in ast.walk(tree):
        for statement in (
            getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []
        ):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text)) as constant):
                    docstrings.append(text)
                    own.add(id(constant))
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in own
    ]
    return docstrings, texts


def habits_of(source: str) -> Iterator[str]:
    r"""Name each habit of a module, once for each time it occurs.

    >>> sorted(habits_of('def f():\n    "Of the node, which is no leaf."'))
    ['begins with a preposition', 'is no X']
    """
    docstrings, texts = docstrings_and_texts(source)
    for name, pattern in FIRST_WORDS.items():
        yield from (name for text in docstrings if pattern.match(text.lstrip()))
    for name, pattern in HABITS.items():
        yield from (name for text in (*docstrings, *texts) for _ in pattern.finditer(text))


@functools.cache
def counted() -> dict[str, int]:
    """Each habit's number in production code."""
    counts = Counter(dict.fromkeys((*FIRST_WORDS, *HABITS), 0))
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            counts.update(habits_of(path.read_text()))
    return dict(counts)


def allowed() -> dict[str, int]:
    """The number of each habit that the test allows."""
    return dict(json.loads(ALLOWED.read_text()))


def main() -> None:
    """Print the counts; with --lower, allow no more than these."""
    counts = counted()
    before = allowed() if ALLOWED.exists() else counts
    if "--lower" in sys.argv[1:]:
        lower = {name: min(count, before.get(name, count)) for name, count in counts.items()}
        ALLOWED.write_text(json.dumps(lower, indent=2) + "\n")
    for name, count in counts.items():
        print(f"{name:32} {count:5}  allowed {before.get(name, count)}")


if __name__ == "__main__":
    main()
