"""The list of mutants agrees with the tree, and the benchmark tells a caught fault from others."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import mutants

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = mutants.mutants()


@functools.cache
def functions_of(file: str) -> frozenset[str]:
    """The names of the functions of a module of tests."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(one.name for one in tree.body if isinstance(one, kinds))


def test_every_package_has_faults() -> None:
    assert len(MUTANTS) >= 40
    assert [name for name, n in Counter(one.name for one in MUTANTS).items() if n > 1] == []
    folders = {one.file.split("/")[0] for one in MUTANTS}
    assert folders >= {
        *("asyncrl", "cache", "engine", "monitoring", "rollout", "scheduler", "trainer", "wire")
    }
    assert len({one.package for one in MUTANTS}) >= 10  # `--quick` takes one of each


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_a_fault_fits_the_tree(mutant: mutants.Mutant) -> None:
    """Its old text is in the file once, what replaces it is Python, and its tests are there."""
    assert mutants.occurrences(ROOT, mutant) == 1
    assert mutant.new != mutant.old
    assert mutant.harm
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    ast.parse(text.replace(mutant.old, mutant.new))
    assert mutant.tests
    for test in mutant.tests:
        file, _, function = test.partition("::")
        assert function in functions_of(file), test


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout of one module and three tests."""
    root = tmp_path / "tree"
    root.mkdir()
    (root / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (root / "halves.py").write_text("def half(n):\n    return n // 2\n")
    (root / "test_halves.py").write_text(
        "import pytest\nfrom halves import half\n\n"
        "@pytest.mark.parametrize('n', [4, 5])\ndef test_it(n):\n    assert half(n) == 2\n\n"
        "def test_nothing():\n    assert half(0) == 0\n\n"
        "def test_wrong():\n    assert half(4) == 3\n"
    )
    subprocess.run(["git", "init", "-q", "."], cwd=root, check=True)
    return root


def listed(tree: Path, *entries: tuple[str, str, str, list[str]]) -> Path:
    """A list of mutants of `halves.py`: name, old text, new text, tests."""
    path = tree.parent / "mutants.toml"
    path.write_text(
        "".join(
            f'[[mutant]]\nname = "{name}"\npackage = "{name}"\nfile = "halves.py"\nharm = "wrong"\n'
            f"old = {json.dumps(old)}\nnew = {json.dumps(new)}\n"
            f"tests = {json.dumps([f'test_halves.py::{test}' for test in tests])}\n\n"
            for name, old, new, tests in entries
        )
    )
    return path


def test_a_fault_is_killed_only_by_the_failure_of_every_test_that_it_names(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = listed(
        tree,
        ("killed", "n // 2", "n / 2", ["test_it"]),
        ("survives", "n // 2", "n // 2 + 0", ["test_it"]),
        ("in-vain", "n // 2", "n / 2", ["test_it", "test_nothing"]),
        ("elsewhere", "n // 3", "n // 4", ["test_it"]),
    )
    out = tree.parent / "out.json"
    arguments = ["--tree", str(tree), "--list", str(path), "--json", str(out)]
    assert mutants.main(arguments) == 1
    written = json.loads(out.read_text())
    assert written["ratios"] == {"killed": 0.25}
    found = {one["name"]: (one["killed_by"], one["problem"]) for one in written["raw"]["mutants"]}
    assert found == {
        "killed": (["test_halves.py::test_it"], ""),
        "survives": ([], "it survived"),
        "in-vain": (
            ["test_halves.py::test_it"],
            "these tests do not find it: test_halves.py::test_nothing",
        ),
        "elsewhere": ([], "its old text is 0 times in halves.py"),
    }
    assert (tree / "halves.py").read_text() == "def half(n):\n    return n // 2\n"
    assert "1 of 4 killed" in capsys.readouterr().out
    assert mutants.main([*arguments, "--only", "killed"]) == 0


def test_tests_that_fail_without_a_fault_or_are_not_there_prove_nothing(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = listed(tree, ("fault", "n // 2", "n / 2", ["test_it", "test_wrong"]))
    assert mutants.main(["--tree", str(tree), "--list", str(path)]) == 1
    said = capsys.readouterr().out.replace("\n", " ")
    assert "these tests fail without a mutant: test_halves.py::test_wrong" in said
    path = listed(tree, ("fault", "n // 2", "n / 2", ["test_absent"]))
    assert mutants.main(["--tree", str(tree), "--list", str(path)]) == 1
    assert "pytest ended with 4" in capsys.readouterr().out


def test_some_are_of_different_packages() -> None:
    assert len({one.package for one in mutants.some(MUTANTS, 10)}) == 10
    assert len(mutants.some(MUTANTS, 2)) == 2
