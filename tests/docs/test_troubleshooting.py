"""Every message of docs/troubleshooting.md is one that the code can give."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("asyncrl", "engine", "trainer", "scheduler", "cache", "monitoring", "wire", "rollout")
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HEADER = "| message | what it means, and what to do |"
GAP = "…"


def messages() -> list[str]:
    """First cells of the tables of messages."""
    tables = [part.split("\n\n")[0] for part in PAGE.split(HEADER)[1:]]
    rows = [line for table in tables for line in table.splitlines() if line.startswith("| ")]
    return [row.split("|")[1].strip().strip("`") for row in rows]


def texts(source: str) -> list[str]:
    """Strings of a module, without its docstrings' indentation; formatted values are gaps."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_the_code_has_these_messages() -> None:
    """Their parts between the gaps, in this order, in one string."""
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    said = "\0".join(text for path in sources for text in texts(path.read_text(encoding="utf-8")))
    unsaid = []
    for message in messages():
        parts = [re.escape(part) for part in message.split(GAP) if part.strip()]
        if re.search("[^\0]*?".join(parts), said) is None:
            unsaid.append(message)
    assert unsaid == [], "no string of the code says them"


def test_the_page_has_its_tables() -> None:
    assert len(messages()) > 30
    assert len(set(messages())) == len(messages())
