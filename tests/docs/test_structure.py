"""What no linter checks: no circles of modules, and a picture that agrees with the code."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Strongly connected modules (Tarjan 1972), each circle sorted by name."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph.find_modules_directly_imported_by(module)):
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            cut = stack.index(module)
            component, stack[cut:] = sorted(stack[cut:]), []
            if len(component) > 1:
                found.append(component)

    for module in sorted(graph.modules):
        if module not in index:
            visit(module)
    return found


def test_no_modules_import_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for types only: two modules that need each other's types are one idea."""
    monkeypatch.setattr(os, "walk", functools.partial(os.walk, followlinks=True))
    graph = grimp.build_graph("asyncrl", cache_dir=None)
    assert len(graph.modules) > 600
    assert circles(graph) == []


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ([("a", "b"), ("b", "c")], []),
        ([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")], [["a", "b", "c"]]),
    ],
)
def test_circles_are_found(imports: list[tuple[str, str]], expected: list[list[str]]) -> None:
    graph = grimp.ImportGraph()
    for name in {name for pair in imports for name in pair}:
        graph.add_module(name)
    for importer, imported in imports:
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == expected


def test_the_picture_of_the_structure_is_current() -> None:
    command = [sys.executable, str(ROOT / "docs" / "structure.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
