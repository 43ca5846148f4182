"""One term per thing: words that the code and its pages once used, and what they say now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "asyncrl", "benchmarks", "cache", "docs", "engine", "examples", "monitoring", "rollout",
    "scheduler", "trainer", "wire",
)  # fmt: skip
TEXTS = [
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".yaml") and path.is_file()
] + [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
INSTEAD = {
    r"conductor": "controller",
    r"deeds": "commands",
    r"written again|write again|writes again": "regenerated",
    r"wrote on|written on|writes on|write on from": "continued",
    r"goes on|go on with|went on": "continues",
    r"who waits for what": "what each process waits for",
    r"if it stands": "if it is waiting",
    r"a bug, not weather": "a defect",
    r"abandoned future": "steps after the checkpoint",
    r"laws?": "distribution",
    r"point.mass(?:es)?": "chain",
    r"stretch(?:es)?": "attempt",
    r"house": "harness",
    r"beside": "next to",
    r"least_(?!loaded)\w+": "min_...",
    r"most_(?!common|probable)\w+": "max_...",
}
ALLOWED = {
    "docs/decisions": (r"point.mass(?:es)?",),
    "docs/exactness.md": (r"point.mass(?:es)?",),  # the mathematician's word, in proofs
    "rollout/acceptance": (r"point.mass(?:es)?",),
}


@pytest.mark.parametrize("old", INSTEAD)
def test_old_words_are_gone(old: str) -> None:
    word = re.compile(rf"\b(?:{old})\b", re.IGNORECASE)
    found = []
    for path in TEXTS:
        name = str(path.relative_to(ROOT))
        if any(name.startswith(place) and old in words for place, words in ALLOWED.items()):
            continue
        found += [
            f"{name}:{number}: {line.strip()[:90]}"
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if word.search(line)
        ]
    assert found == [], f"say {INSTEAD[old]}"
