"""The house rules that no linter holds: sizes, circles, and a picture that agrees with the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("asyncrl", "cache", "engine", "monitoring", "rollout", "scheduler", "trainer", "wire")
FOLDERS = (*PACKAGES, "benchmarks", "docs", "examples", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MAX_FILE_LINES, MAX_CLASS_LINES = 400, 250


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_file_is_too_long() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert len(lengths) > 300
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_no_class_is_too_long_without_saying_why() -> None:
    """A longer one has a paragraph in its docstring that begins with `Long because`."""
    too_long = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_CLASS_LINES and "Long because" not in (
                    ast.get_docstring(node) or ""
                ):
                    too_long[f"{name_of(path)}: {node.name}"] = lines
    assert too_long == {}


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


def test_no_modules_import_each_other() -> None:
    """Not even for types only: two modules that need each other's types are one idea."""
    graph = grimp.build_graph(*PACKAGES)
    assert len(graph.modules) > 200
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
