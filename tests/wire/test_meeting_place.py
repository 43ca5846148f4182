"""The folder in which the processes of a node meet their relay."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.wire.errors import AddressTooLong, FolderNotPrivate
from asyncrl.wire.transport.addresses import MeetingPlace, is_private, remove_stale_directories


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as parent:  # pytest's own folders have paths too long
        monkeypatch.setenv("XDG_RUNTIME_DIR", parent)
        yield f"ipc://{parent}/asyncrl-0123456789/control"


def folder_of(address: str) -> Path:
    return Path(address.removeprefix("ipc://")).parent


def test_whoever_comes_first_makes_it_and_the_last_one_removes_it(address: str) -> None:
    first = MeetingPlace(address)
    assert is_private(folder_of(address))
    second = MeetingPlace(address)
    first.close()
    first.close()
    assert folder_of(address).is_dir()
    remove_stale_directories()
    assert folder_of(address).is_dir(), "somebody is there"
    second.close()
    assert not folder_of(address).exists()


def test_what_killed_processes_left_is_removed(address: str) -> None:
    program = (
        "import os, sys; from asyncrl.wire.transport.addresses import MeetingPlace; "
        "place = MeetingPlace(sys.argv[1]); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, address], check=False)
    assert folder_of(address).is_dir()
    again = MeetingPlace(address)
    assert folder_of(address).is_dir(), "a replacement meets its node's processes there"
    again.close()
    subprocess.run([sys.executable, "-c", program, address], check=False)
    remove_stale_directories()
    assert not folder_of(address).exists()


def test_a_folder_that_others_can_access_is_refused(address: str) -> None:
    folder_of(address).mkdir(mode=0o755)
    with pytest.raises(FolderNotPrivate, match="can be accessed by others"):
        MeetingPlace(address)
    folder_of(address).rmdir()
    private = folder_of(address).with_name("private")
    private.mkdir(mode=0o700)
    folder_of(address).symlink_to(private)
    with pytest.raises(FolderNotPrivate):
        MeetingPlace(address)


def test_a_path_that_is_too_long_for_a_socket_is_refused(address: str) -> None:
    with pytest.raises(AddressTooLong, match="TMPDIR"):
        MeetingPlace(address.replace("0123456789", "0" * 90))
