"""Compiled kernels are never stale, need no writable directory, and sum in one order."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.rollout import jit


def test_kernels_work_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setattr(jit.numba.config, "CACHE_DIR", str(blocked))
    with caplog.at_level(logging.WARNING):
        kernel = jit.Compiler(tmp_path)
    assert "NUMBA_CACHE_DIR" in caplog.text

    @kernel
    def plus_one(value: int) -> int:
        return value + 1

    assert plus_one(1) == 2


AT_ONCE = """
import sys
from pathlib import Path
from asyncrl.rollout import jit

kernel = jit.Compiler(Path(sys.argv[1]))

@kernel
def doubled(value):
    return 2 * value

@kernel
def summed(values):
    total = 0
    for value in values:
        total += doubled(value)
    return total

print("ready", flush=True)
sys.stdin.readline()
assert summed((1, 2, 3)) == 12
print(sum(one.stats.cache_misses.total() for one in (doubled, summed)))
"""


def test_processes_that_start_at_once_compile_each_kernel_once(tmp_path: Path) -> None:
    """By numba's counters of what was not on the disk."""
    script = tmp_path / "at_once.py"
    script.write_text(AT_ONCE)
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for one in running:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    for one in running:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    assert sum(int(one.communicate(timeout=200)[0]) for one in running) == 2


def test_a_process_that_holds_a_kernel_for_ever_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(jit, "_locked", lambda _file: False)
    with jit._alone(tmp_path / "lock"), jit._alone(tmp_path / "lock"):
        assert (tmp_path / "lock").exists()
    assert not jit._held
    with jit._alone(tmp_path / "nowhere" / "lock"):
        pass


def test_other_kernels_get_another_directory(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()

    def directory(source: str) -> Path | None:
        (package / "store.py").write_text(source)
        return jit.code_directory(package, str(tmp_path))

    first = directory("@kernel")
    assert first is not None
    assert directory("@kernel  # changed") != first
    assert directory("@kernel") == first


def test_another_version_of_numba_keeps_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = jit.code_directory(tmp_path, str(tmp_path))
    monkeypatch.setattr(jit.numba, "__version__", "0.0.1")
    assert jit.code_directory(tmp_path, str(tmp_path)) != first


def test_sources_without_kernels_do_not_count(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    first = jit.code_directory(package, str(tmp_path))
    (package / "config.py").write_text("SIZE = 1")
    assert jit.code_directory(package, str(tmp_path)) == first


def test_a_changed_kernel_of_another_package_that_is_inlined_counts(tmp_path: Path) -> None:
    package, other = tmp_path / "package", tmp_path / "other"
    package.mkdir()
    other.mkdir()
    (package / "store.py").write_text("@kernel")

    def directory(source: str, *inlined: Path) -> Path | None:
        (other / "shared.py").write_text(source)
        return jit.code_directory(package, str(tmp_path), inlined)

    first = directory("@kernel", other)
    assert directory("@kernel  # changed", other) != first
    assert directory("@kernel") == directory("@kernel  # changed")


ROOT = Path(jit.__file__).parent.parent
FAST = ("of_sums", "of_vectors")
LOOPS = (ast.For, ast.While)


def _sums_beside_stores(source: str) -> Iterator[str]:
    """Innermost loops of reordered kernels that both sum and store, as `function:line`."""
    for kernel in ast.walk(ast.parse(source)):
        if not isinstance(kernel, ast.FunctionDef):
            continue
        if not any(ast.unparse(one).endswith(FAST) for one in kernel.decorator_list):
            continue
        for loop in (one for one in ast.walk(kernel) if isinstance(one, LOOPS)):
            inside = [node for statement in loop.body for node in ast.walk(statement)]
            if any(isinstance(node, LOOPS) for node in inside):
                continue
            stores = any(
                isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store) for n in inside
            )
            if stores and any(map(_is_sum, inside)):
                yield f"{kernel.name}:{loop.lineno}"


def _is_sum(node: ast.AST) -> bool:
    """`total += x`, or `total = total + x` in any form."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Name)
    if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
        return False
    names = [one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)]
    return node.targets[0].id in names


@pytest.mark.parametrize("change", ["mean += x[d]", "mean = x[d] + mean"])
def test_a_sum_beside_a_store_is_noticed(change: str) -> None:
    kernel = f"@kernel.of_vectors\ndef f(x, y):\n for d in range(9):\n  {change}\n"
    assert not list(_sums_beside_stores(kernel))
    assert list(_sums_beside_stores(kernel + "  y[d] = x[d]\n")) == ["f:3"]


def test_no_kernel_sums_in_an_order_that_depends_on_where_its_arrays_lie() -> None:
    """See `Compiler.of_sums`. A resumed run once differed by such a sum, one time in 70."""
    sources = {
        str(path): path.read_text(encoding="utf-8")
        for package in ("cache", "engine", "rollout", "trainer")
        for path in (ROOT / package).rglob("*.py")
    }
    assert sum("@kernel.of_vectors" in text for text in sources.values()) >= 5
    found = {path: list(_sums_beside_stores(text)) for path, text in sources.items()}
    assert not {path: loops for path, loops in found.items() if loops}
