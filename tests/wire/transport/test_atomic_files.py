"""A file is replaced as a whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.wire.transport.atomic_files import replacing, write_atomically


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for text in ("old", "né"):
        write_atomically(path, text)
    assert path.read_text(encoding="utf-8") == "né"
    assert list(tmp_path.iterdir()) == [path]


def test_readers_see_the_old_contents_until_the_new_ones_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_a_failed_replacement_leaves_the_old_contents_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"a part")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_private_file_is_private_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who had opened it before a later change of its mode could read what is written then.
    monkeypatch.setattr("os.fchmod", lambda *_: None)
    path = tmp_path / "asyncrl.cache.sharing.snapshot"
    with replacing(path, mode=0o600) as file:
        file.write(b"tokens")
        (temporary,) = tmp_path.iterdir()
        assert temporary.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_mode & 0o777 == 0o600
