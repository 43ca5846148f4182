"""Files between relays when a disk is full, a request makes no sense, or a relay was killed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from file_relays import Relays, server, until, with_relays, write

from asyncrl.relay import files as file_server
from asyncrl.relay.files import answer_to
from asyncrl.relay.mirror import Mirror
from asyncrl.relay.pull import FileClient, FileUnavailable
from asyncrl.wire.errors import WireError
from asyncrl.wire.messages import files


def test_an_offset_beyond_all_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_bytes(b"1")
    for offset in (2**63 - 1, 2**63, 2**64 - 1):
        answer = answer_to(tmp_path, files.ReadFile(7, "samples.jsonl", offset, 1))
        assert isinstance(answer, files.NotServed | files.FilePart)
        assert answer.number == 7


def test_a_relay_whose_files_are_not_served_any_more_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a defect")

    async def work(relays: Relays) -> None:
        relays.other.check()
        monkeypatch.setattr(file_server, "answer_to", broken)
        relays.follow("generator-0")

        def is_noticed() -> bool:
            with contextlib.suppress(WireError):
                relays.other.check()
                return False
            return True

        await until(is_noticed)

    with_relays(tmp_path, work)


def test_a_folder_whose_id_was_not_written_gets_one(tmp_path: Path) -> None:
    for folder in ("run", "node"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ".folder").touch()  # its relay was killed

    async def work(relays: Relays) -> None:
        assert len({relays.home.ready.folder, relays.other.ready.folder} - {""}) == 2

    with_relays(tmp_path, work)


@pytest.mark.parametrize("at_once", [0, 3, 12])
def test_samples_that_a_full_disk_did_not_take_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    data, write = b"".join(b"line %d\n" % n for n in range(5)), os.write

    def write_part(file: int, data: bytes) -> int:
        return write(file, data[:at_once])

    mirror = Mirror(tmp_path, "folder")
    with monkeypatch.context() as full:
        full.setattr(os, "write", write_part)
        with pytest.raises(OSError, match="No space"):
            mirror.add("samples.jsonl", 0, data)
    assert Mirror(tmp_path, "folder").held("samples.jsonl") == len(data)
    lines = (tmp_path / "samples.jsonl").read_bytes().splitlines(keepends=True)
    assert [line for line in lines if line in data.splitlines(keepends=True)] == data.splitlines(
        keepends=True
    )


def test_only_what_was_copied_is_removed_and_never_from_the_runs_folder(tmp_path: Path) -> None:
    path = "unfinished/step-1/generator-0.bin"

    async def removed(name: str, relays: Relays, file: files.FileInfo) -> bool:
        ready = relays.home.ready if name == "relay-0" else relays.other.ready
        client = FileClient(server(name, ready))
        try:
            await client.remove(file)
        except FileUnavailable as error:
            why = str(error)
        else:
            why = ""
        finally:
            client.close()
        assert "has not answered" not in why
        return not why

    async def work(relays: Relays) -> None:
        for folder in (relays.run, relays.node):
            write(folder, path, b"tokens")
        found = (relays.node / path).stat()
        copied = files.FileInfo(path, found.st_size, found.st_mtime_ns)
        write(relays.node, path, b" and more")
        assert not await removed("relay-1", relays, copied)
        assert (relays.node / path).read_bytes() == b"tokens and more"
        found = (relays.node / path).stat()
        copied = files.FileInfo(path, found.st_size, found.st_mtime_ns)
        assert await removed("relay-1", relays, copied)
        assert not (relays.node / path).exists()
        found = (relays.run / path).stat()
        copied = files.FileInfo(path, found.st_size, found.st_mtime_ns)
        assert not await removed("relay-0", relays, copied)
        assert (relays.run / path).exists()

    with_relays(tmp_path, work)
