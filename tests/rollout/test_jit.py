"""Compiled kernels are never stale, and an unwritable directory is no obstacle."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rollout import jit


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
