"""Files between relays, over real sockets: what is served, what is copied, what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from file_relays import KEY, Relays, server, source, until, with_relays, write
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.launch.child_spec import files_hub
from asyncrl.relay import pull
from asyncrl.relay.files import answer_to
from asyncrl.relay.mirror import Kind, Mirror, PathRefused, files_of, rule_of
from asyncrl.relay.pull import FileClient, FileUnavailable
from asyncrl.wire import RunKey
from asyncrl.wire.messages import files, from_relay, to_relay


def test_what_grows_is_copied_and_continued(tmp_path: Path) -> None:
    async def work(relays: Relays) -> None:
        write(relays.run, "logs/generator-0.log", b"of an earlier start\n")
        write(relays.run, "timeline/generator-0.jsonl", b'{}\n{"cut off')
        write(relays.node, "logs/generator-0.log", b"one\n")
        write(relays.node, "timeline/generator-0.jsonl", b"{1}\n")
        write(relays.node, "samples.jsonl", b"{a}\n{b")
        relays.follow("generator-0")
        assert await relays.finish() == {}
        log = relays.run / "logs/generator-0.log"
        assert log.read_bytes() == b"of an earlier start\none\n"
        assert (relays.run / "timeline/generator-0.jsonl").read_bytes() == b"{}\n{1}\n"
        assert (relays.run / "samples.jsonl").read_bytes() == b"{a}\n", "whole lines only"
        write(relays.node, "logs/generator-0.log", b"x" * (3 << 20))
        write(relays.node, "samples.jsonl", b"}\n")
        write(relays.run, "samples.jsonl", b"{of another node}\n")
        assert await relays.finish() == {}
        assert log.read_bytes() == b"of an earlier start\none\n" + b"x" * (3 << 20)
        samples = (relays.run / "samples.jsonl").read_bytes()
        assert samples == b"{a}\n{of another node}\n{b}\n"
        assert (
            relays.home.puller.pulled_bytes
            == relays.other.server.sent_bytes
            == 4 + 4 + 8 + (3 << 20)
        )

    with_relays(tmp_path, work)


def test_another_relay_continues_where_a_killed_one_ended(tmp_path: Path) -> None:
    async def first(relays: Relays) -> None:
        write(relays.run, "logs/generator-0.log", b"before\n")
        write(relays.node, "logs/generator-0.log", b"abc" * 100_000)
        write(relays.node, "samples.jsonl", b"{a}\n{b}\n")
        relays.follow("generator-0")
        assert await relays.finish() == {}

    with_relays(tmp_path, first)
    run, expected = tmp_path / "run", b"before\n" + b"abc" * 100_000
    with (run / "logs/generator-0.log").open("r+b") as log:
        log.truncate(1000)  # it was killed in mid-copy
    for mark in run.glob(".pulled/*.merged"):
        mark.unlink()  # it was killed before it noted what it had appended

    async def second(relays: Relays) -> None:
        write(relays.node, "logs/generator-0.log", b"end")
        relays.follow("generator-0")
        write(relays.node, "samples.jsonl", b"{c}\n")
        assert await relays.finish() == {}

    with_relays(tmp_path, second)
    assert (run / "logs/generator-0.log").read_bytes() == expected + b"end"
    assert (run / "samples.jsonl").read_bytes() == b"{a}\n{b}\n{c}\n"


def test_what_is_replaced_as_a_whole_is_copied_as_a_whole(tmp_path: Path) -> None:
    async def work(relays: Relays) -> None:
        unfinished, cache = "unfinished/step-000004/generator-0.bin", "cache/generator-0.snapshot"
        write(relays.node, unfinished, b"u" * (5 << 20))
        write(relays.node, cache, b"one")
        write(relays.node, "recent/generator-0.jsonl", b"{}\n")
        write(relays.node, "cache/.generator-0.snapshot.77", b"being written")
        relays.follow("generator-0")
        assert await relays.finish() == {}
        assert (relays.run / unfinished).read_bytes() == b"u" * (5 << 20)
        assert not (relays.node / unfinished).exists(), "the run's folder alone forgets it in time"
        assert (relays.run / cache).read_bytes() == b"one"
        assert (relays.run / "recent/generator-0.jsonl").read_bytes() == b"{}\n"
        (relays.run / unfinished).unlink()
        (relays.node / cache).unlink()
        write(relays.node, cache, b"another")
        assert await relays.finish() == {}
        assert not (relays.run / unfinished).exists(), "it does not come back"
        assert (relays.run / cache).read_bytes() == b"another"
        before = relays.home.puller.pulled_bytes
        assert await relays.finish() == {}
        assert relays.home.puller.pulled_bytes == before
        assert sorted(path.name for path in relays.run.glob(".pulled/*.part")) == []

    with_relays(tmp_path, work)


def test_a_file_that_is_replaced_again_and_again_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `recent/` is: each time after it was listed, and before it is read."""
    path, times = "recent/generator-0.jsonl", iter(range(100))
    list_files = FileClient.list

    async def work(relays: Relays) -> None:
        async def listed(client: FileClient) -> tuple[files.FileInfo, ...]:
            found = await list_files(client)
            (relays.node / path).unlink()
            write(relays.node, path, b"{}\n" * next(times))
            return found

        write(relays.node, path, b"{}\n" * 500)
        monkeypatch.setattr(FileClient, "list", listed)
        next(times)
        relays.follow("generator-0")
        assert await relays.finish() == {}
        assert 0 < (relays.run / path).stat().st_size < 300

    with_relays(tmp_path, work)


def test_a_named_file_is_fetched_from_whoever_has_it(tmp_path: Path) -> None:
    async def work(relays: Relays) -> None:
        path = "unfinished/leaving/generator-3.bin"
        write(relays.run, path, b"tokens" * 300_000)
        nobody = server("relay-1", relays.other.ready)
        home = files.Server(
            "relay-0", relays.home.ready.address, KEY.line(files_hub("relay-0"), "relay-1")
        )
        relays.other.fetch(to_relay.FetchFile(7, path, (nobody, home)))
        assert await relays.hear(from_relay.FileHere) == from_relay.FileHere(7, path)
        assert (relays.node / path).read_bytes() == b"tokens" * 300_000
        (relays.run / path).unlink()
        relays.other.fetch(to_relay.FetchFile(7, path, (home,)))
        await until(lambda: relays.said[1:] == [from_relay.FileHere(7, path)])  # it has it already
        relays.other.fetch(to_relay.FetchFile(8, "unfinished/leaving/none.bin", (home,)))
        missing = await relays.hear(from_relay.FileMissing)
        assert missing.reason == "relay-0 does not have unfinished/leaving/none.bin"
        relays.other.fetch(to_relay.FetchFile(9, "../run/control.key", (home,)))
        await until(lambda: relays.said[-1].attempt == 9)
        assert isinstance(relays.said[-1], from_relay.FileMissing)

    with_relays(tmp_path, work)


def test_what_was_brought_to_a_node_stays_there(tmp_path: Path) -> None:
    async def work(relays: Relays) -> None:
        path = "unfinished/step-000004/generator-0.bin"
        write(relays.run, path, b"tokens")
        home = files.Server(
            "relay-0", relays.home.ready.address, KEY.line(files_hub("relay-0"), "relay-1")
        )
        relays.other.fetch(to_relay.FetchFile(1, path, (home,)))
        await relays.hear(from_relay.FileHere)
        relays.said.clear()
        relays.follow("generator-0")
        assert await relays.finish() == {}
        assert (relays.node / path).read_bytes() == b"tokens", "its generator reads it"
        (relays.run / path).unlink()  # it is not needed any more
        assert await relays.finish() == {}
        assert not (relays.run / path).exists()
        write(relays.node, path, b"and more, by the generator")
        assert await relays.finish() == {}
        assert (relays.run / path).read_bytes() == b"tokensand more, by the generator"
        assert not (relays.node / path).exists()

    with_relays(tmp_path, work)


def test_a_node_without_a_relay_is_named_and_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(pull, "RETRY_SECONDS", 0.05)

    async def work(relays: Relays) -> None:
        write(relays.node, "logs/generator-0.log", b"here")
        dead = from_relay.FilesReady("tcp://127.0.0.1:1", "folder", shares_run_directory=False)
        sources = source("relay-1", relays.other.ready, "generator-0"), source("relay-2", dead, "g")
        relays.home.pull(to_relay.PullFiles(sources))
        left = await relays.finish(2.0)
        assert list(left) == ["relay-2"]
        assert "has not answered ListFiles" in left["relay-2"]
        assert (relays.run / "logs/generator-0.log").read_bytes() == b"here"

    with_relays(tmp_path, work)


def test_a_connection_that_was_replaced_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(pull, "RETRY_SECONDS", 0.05)

    async def work(relays: Relays) -> None:
        relays.follow("generator-0")
        assert await relays.finish() == {}
        other = FileClient(server("relay-1", relays.other.ready))
        assert await other.list() == ()  # the hub knows one connection of a name, the newest
        write(relays.node, "logs/generator-0.log", b"later")
        assert await relays.finish() == {}
        assert (relays.run / "logs/generator-0.log").read_bytes() == b"later"
        other.close()

    with_relays(tmp_path, work)


def test_a_file_of_another_nodes_process_is_not_taken(tmp_path: Path) -> None:
    async def work(relays: Relays) -> None:
        for name in ("generator-0", "trainer"):
            write(relays.node, f"logs/{name}.log", b"its log")
        relays.follow("generator-0")
        assert await relays.finish() == {}
        assert [path.name for path in (relays.run / "logs").iterdir()] == ["generator-0.log"]

    with_relays(tmp_path, work)


def test_a_disk_that_refuses_is_named_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "RETRY_SECONDS", 0.05)

    async def work(relays: Relays) -> None:
        write(relays.node, "logs/generator-0.log", b"its log")
        write(relays.node, "engine/generator-0.jsonl", b"{}\n")
        (relays.run / "logs").symlink_to(tmp_path)  # copies never leave the run's folder
        relays.follow("generator-0")
        left = await relays.finish(1.0)
        assert "relay-1" in left
        assert (relays.run / "engine/generator-0.jsonl").read_bytes() == b"{}\n", "all the same"
        assert not (tmp_path / "generator-0.log").exists()
        (relays.run / "logs").unlink()
        assert await relays.finish() == {}
        assert (relays.run / "logs/generator-0.log").read_bytes() == b"its log"

    with_relays(tmp_path, work)


def test_a_nodes_folder_goes_with_the_run_and_the_runs_stays(tmp_path: Path) -> None:
    async def work(relays: Relays) -> None:
        relays.home.remove()
        relays.other.remove()
        assert relays.run.exists()
        assert not relays.node.exists()

    with_relays(tmp_path, work)


ANYTHING = st.text(max_size=40) | st.lists(
    st.sampled_from(["..", ".", "logs", "cache", "unfinished", "a", "a.log", "control.key", ""]),
    max_size=4,
).map("/".join)


@settings(max_examples=300)
@given(ANYTHING)
def test_no_path_leaves_the_folder(path: str) -> None:
    try:
        kind, owner = rule_of(path)
    except PathRefused:
        return
    assert kind in Kind
    parts = path.split("/")
    assert len(parts) <= 3
    assert all(part and not part.startswith(".") for part in parts)
    assert owner in path


def test_links_and_other_files_are_not_served(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for path in ("logs/a.log", "control.key", "checkpoints/x", "config.yaml"):
        write(root, path, b"secret")
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (root / "logs/b.log").symlink_to(secret)
    (root / "engine").symlink_to(root / "checkpoints")
    (root / "slots").mkdir()
    os.mkfifo(root / "slots/a.jsonl")
    assert [path for path, _ in files_of(root)] == ["logs/a.log"]
    for path in (
        "logs/b.log", "control.key", "logs/../control.key", "/etc/passwd", "slots/a.jsonl",
        "engine/x.jsonl", "logs/none.log", "unfinished/../logs/a.bin", "logs/a.log\0",
    ):  # fmt: skip
        answer = answer_to(root, files.ReadFile(1, path, 0, 9))
        assert isinstance(answer, files.NotServed), path
    for path in ("logs/a.log", "logs/b.log", "unfinished/a/b.bin"):
        assert isinstance(answer_to(root, files.RemoveFile(1, path, 0, 0)), files.NotServed)
    part = answer_to(root, files.ReadFile(1, "logs/a.log", 3, 9))
    assert isinstance(part, files.FilePart)
    assert (part.data, part.size) == (b"ret", 6)


def test_a_peer_without_a_key_gets_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "ANSWER_SECONDS", 0.5)

    async def work(relays: Relays) -> None:
        wrong = RunKey.new().line(files_hub("relay-1"), "relay-0")
        address = relays.other.ready.address
        client = FileClient(files.Server("relay-1", address, wrong))
        with pytest.raises(FileUnavailable, match="has not answered"):
            await client.list()
        client.close()
        theirs = FileClient(server("relay-1", relays.other.ready))
        assert await theirs.list() == ()
        theirs.close()

    with_relays(tmp_path, work)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_copies_are_exact_however_often_they_are_interrupted(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("run")
    path, before = "logs/g.log", data.draw(st.binary(max_size=5))
    write(root, path, before)
    whole = data.draw(st.binary(min_size=1, max_size=60))
    mirror = Mirror(root, "f")
    while (held := mirror.held(path)) < len(whole):
        size = data.draw(st.integers(1, 20))
        mirror.add(path, held, whole[held : held + size])
        if data.draw(st.booleans()):  # killed: what it had begun to write may be there in part
            rest = whole[held : held + data.draw(st.integers(0, size))]
            os.truncate(root / path, len(before) + held + len(rest))
            mirror = Mirror(root, "f")
    assert (root / path).read_bytes() == before + whole


def test_a_note_that_a_crash_has_cut_off_costs_its_file_alone(tmp_path: Path) -> None:
    write(tmp_path, "logs/g.log", b"")
    Mirror(tmp_path, "f").add("logs/g.log", 0, b"one")
    (notes,) = tmp_path.rglob("f.jsonl")
    notes.write_bytes(notes.read_bytes()[:-5])
    mirror = Mirror(tmp_path, "f")
    assert mirror.held("logs/h.log") == 0
    mirror.add("logs/h.log", 0, b"two")
    assert Mirror(tmp_path, "f").held("logs/h.log") == 3


CHILD = """
import asyncio, sys
from pathlib import Path
import msgspec
from asyncrl.wire.messages import to_relay
from asyncrl.relay.pull import Puller

async def main():
    puller = Puller(Path(sys.argv[1]))
    puller.follow((msgspec.json.decode(sys.stdin.buffer.read(), type=to_relay.FileSource),))
    print("follows", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def puller(run: Path, followed: bytes) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(run)], stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(followed)
    child.stdin.close()
    return child


def test_a_relay_that_is_killed_in_mid_copy_loses_and_doubles_nothing(tmp_path: Path) -> None:
    async def work(relays: Relays) -> None:
        content = os.urandom(24 << 20)
        write(relays.node, "logs/generator-0.log", content)
        theirs = msgspec.json.encode(source("relay-1", relays.other.ready, "generator-0"))
        copy = relays.run / "logs/generator-0.log"
        for share in (0.2, 0.6):
            child = puller(relays.run, theirs)
            enough = int(share * len(content))
            await until(lambda: copy.exists() and copy.stat().st_size >= enough)  # noqa: B023
            child.send_signal(signal.SIGKILL)
            child.wait()
        assert copy.stat().st_size < len(content), "it was killed before the end"
        relays.follow("generator-0")
        assert await relays.finish() == {}
        assert copy.read_bytes() == content

    with_relays(tmp_path, work)
