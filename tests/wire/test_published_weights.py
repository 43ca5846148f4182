"""Weights through shared memory: what is read is one whole version, or an exception."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncrl.wire.errors import PublishError, WeightsReadError, WeightsSupersededError
from asyncrl.wire.weights.layout import WeightManifest
from asyncrl.wire.weights.reader import WeightBuffer
from asyncrl.wire.weights.writer import WeightPublisher, published


def _weights(fill: float) -> list[tuple[str, torch.Tensor]]:
    return [
        ("a", torch.full((3, 5), fill)),
        ("b", torch.full((7,), fill, dtype=torch.bfloat16)),
        ("empty", torch.empty(0, 4)),
        ("scalar", torch.tensor(fill, dtype=torch.float64)),
        ("turned", torch.arange(6.0).view(2, 3).t() + fill),
    ]


def _read(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    buffer = WeightBuffer()
    buffer.read(manifest)
    return dict(buffer.tensors())


def test_round_trip_and_alternation(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path, "run-1") as publisher:
        manifests = [publisher.publish(_weights(float(v)), v) for v in range(3)]
        wire = msgspec.msgpack.decode(msgspec.msgpack.encode(manifests[1]), type=WeightManifest)
        for manifest, fill in ((manifests[2], 2.0), (wire, 1.0)):
            got = _read(manifest)
            assert list(got) == ["a", "b", "empty", "scalar", "turned"]
            for name, want in _weights(fill):
                assert torch.equal(got[name], want)
                assert got[name].dtype == want.dtype
        with pytest.raises(WeightsSupersededError, match="holds version 2"):
            _read(manifests[0])
        for path in {Path(m.path) for m in manifests}:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []
    publisher.close()


def test_only_versions_that_are_published_can_be_had_again(tmp_path: Path) -> None:
    """The second file is reserved but unwritten at first: its zeros are no version -1."""
    with WeightPublisher(tmp_path, "run-1") as publisher:
        assert publisher.tensors_of(0) == []
        publisher.publish(_weights(5.0), 0)
        assert publisher.tensors_of(-1) == []
        publisher.publish(_weights(6.0), 1)
        before = dict(publisher.tensors_of(0))
        assert all(torch.equal(before[name], want) for name, want in _weights(5.0))
        publisher.publish(_weights(7.0), 2)
        assert publisher.tensors_of(0) == []


@pytest.mark.parametrize("overwritten", ["before the copy", "after the copy"])
def test_overwritten_while_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwritten: str
) -> None:
    copy = os.preadv
    with WeightPublisher(tmp_path, "run") as publisher:
        buffer = WeightBuffer()
        buffer.read(publisher.publish(_weights(0.0), 0))
        manifest = publisher.publish(_weights(1.0), 1)

        def meanwhile(*where: Any) -> int:
            if overwritten == "before the copy":
                publish_twice()
            done = copy(*where)
            if overwritten == "after the copy":
                publish_twice()
            return done

        def publish_twice() -> None:
            for version in (2, 3):
                publisher.publish(_weights(float(version)), version)

        monkeypatch.setattr(os, "preadv", meanwhile)
        with pytest.raises(WeightsSupersededError, match="holds version 3"):
            buffer.read(manifest)
        with pytest.raises(WeightsReadError, match="no complete version"):
            next(buffer.tensors())


def test_a_version_that_is_not_the_next_to_be_overwritten_stays_readable(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path, "run") as publisher:
        manifest = publisher.publish(_weights(3.0), 3)
        publisher.publish(_weights(4.0), 4)
        assert torch.equal(_read(manifest)["a"], torch.full((3, 5), 3.0))


def test_a_buffer_is_used_again_and_follows_the_size(tmp_path: Path) -> None:
    buffer = WeightBuffer()
    with WeightPublisher(tmp_path, "run") as publisher:
        buffer.read(publisher.publish(_weights(1.0), 1))
        place = dict(buffer.tensors())["a"].data_ptr()
        buffer.read(publisher.publish(_weights(2.0), 2))
        assert buffer.policy_version == 2
        assert dict(buffer.tensors())["a"].data_ptr() == place
    with published([("other", torch.arange(4000))], 9, tmp_path) as manifest:
        buffer.read(manifest)
    assert list(tmp_path.iterdir()) == []
    ((name, tensor),) = buffer.tensors()
    assert name == "other"
    assert torch.equal(tensor, torch.arange(4000))


def test_a_racing_reader_never_takes_a_torn_version(tmp_path: Path) -> None:
    newest: list[WeightManifest] = []
    taken = superseded = 0
    with WeightPublisher(tmp_path, "run") as publisher:

        def write() -> None:
            for version in range(1, 300):
                newest[0] = publisher.publish([("w", torch.full((1 << 16,), version))], version)

        newest.append(publisher.publish([("w", torch.full((1 << 16,), 0))], 0))
        writer = threading.Thread(target=write)
        writer.start()
        while writer.is_alive() or not taken:
            manifest = newest[0]
            try:
                value = _read(manifest)["w"]
            except WeightsSupersededError:
                superseded += 1
                continue
            assert bool((value == manifest.policy_version).all())
            taken += 1
        writer.join()
    assert taken


def test_read_while_being_written(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path, "run") as publisher:
        manifest = publisher.publish(_weights(0.0), 0)
        with Path(manifest.path).open("r+b") as file:
            file.write((-1).to_bytes(8, "little", signed=True))
        with pytest.raises(WeightsSupersededError, match="being written"):
            _read(manifest)


def test_readers_cannot_change_the_file(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path, "run") as publisher:
        manifest = publisher.publish(_weights(1.0), 0)
        for tensor in _read(manifest).values():
            tensor.zero_()
        assert torch.equal(_read(manifest)["a"], torch.ones(3, 5))


def test_impossible_manifests_are_refused(tmp_path: Path) -> None:
    with WeightPublisher(tmp_path, "run") as publisher:
        good = publisher.publish(_weights(1.0), 0)
        first = good.tensors[0]
        replace = msgspec.structs.replace
        for changed, reason in [
            (replace(first, dtype="load"), "unknown data type"),
            (replace(first, shape=(9, 9)), "does not fill"),
            (replace(first, offset=0), "does not fill"),
            (replace(first, offset=good.nbytes - 4), "does not fill"),
            (replace(first, shape=(-3, -5)), "does not fill"),
        ]:
            with pytest.raises(WeightsReadError, match=reason):
                _read(replace(good, tensors=(changed,)))
        with pytest.raises(WeightsReadError, match="expected 7 bytes"):
            _read(replace(good, nbytes=7))
        link = tmp_path / "link"
        link.symlink_to(good.path)
        with pytest.raises(WeightsReadError, match="cannot be opened"):
            _read(replace(good, path=str(link)))
    with pytest.raises(WeightsReadError, match="version 0 were removed"):
        _read(good)


def test_publisher_refuses_what_readers_could_not_use(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="run id"):
        WeightPublisher(tmp_path, "../etc")
    with WeightPublisher(tmp_path, "run") as publisher:
        publisher.publish(_weights(0.0), 0)
        with pytest.raises(PublishError, match="0 or more"):
            publisher.publish(_weights(0.0), -1)
        with pytest.raises(PublishError, match="4 tensors"):
            publisher.publish(_weights(0.0)[:4], 1)
        with pytest.raises(PublishError, match="tensor a float64"):
            publisher.publish([("a", torch.ones(3, 5).double()), *_weights(0.0)[1:]], 1)
    with (
        pytest.raises(PublishError, match="'a' was given twice"),
        published([("a", torch.zeros(1)), ("a", torch.zeros(1))], 1, tmp_path),
    ):
        pass


def test_too_little_memory_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PublishError, match="shm-size"):
        WeightPublisher(tmp_path, "run").publish(_weights(0.0), 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["unlink", "open"])
def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, call, read_only)
    with pytest.raises(PublishError, match=r"cannot create .*: Read-only file system; .* need a f"):
        WeightPublisher(tmp_path, "run").publish(_weights(0.0), 0)


def test_files_of_a_killed_run_are_replaced(tmp_path: Path) -> None:
    planted = tmp_path / "asyncrl-run-weights-0"
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    planted.symlink_to(victim)
    with WeightPublisher(tmp_path, "run") as publisher:
        publisher.publish(_weights(0.0), 0)
    assert victim.read_text() == "untouched"


def test_weights_are_published_and_read_in_the_data_types_that_are_wanted(tmp_path: Path) -> None:
    """float32 to bfloat16 by the writer, to others by the reader, over many small steps."""
    large = torch.randn(700, 1001)  # more than two of the reader's steps
    given = [("large", large), ("count", torch.arange(5)), ("one", torch.tensor(1.5))]
    with WeightPublisher(tmp_path, "run", dtype=torch.bfloat16) as publisher:
        publisher.publish(given, 0)
        manifest = publisher.publish(given, 1)
        assert [spec.dtype for spec in manifest.tensors] == ["bfloat16", "int64", "bfloat16"]
        assert manifest.nbytes < large.nbytes
        plain = _read(manifest)
        assert torch.equal(plain["large"], large.to(torch.bfloat16))
        assert torch.equal(plain["count"], torch.arange(5))
        buffer = WeightBuffer(
            lambda name, published: torch.float32 if name == "large" else published
        )
        for _ in range(2):
            buffer.read(manifest)
            got = dict(buffer.tensors())
            assert torch.equal(got["large"], large.to(torch.bfloat16).float())
            assert (got["one"].dtype, got["one"].item()) == (torch.bfloat16, 1.5)
            assert torch.equal(got["count"], torch.arange(5))
        with pytest.raises(PublishError, match="tensor one int64"):
            publisher.publish([*given[:2], ("one", torch.tensor(1))], 2)


def test_a_version_overtaken_while_it_is_converted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, calls = os.preadv, [0]
    with WeightPublisher(tmp_path, "run") as publisher:
        manifest = publisher.publish(_weights(1.0), 1)

        def meanwhile(*where: Any) -> int:
            calls[0] += 1
            if calls[0] == 3:
                for version in (2, 3):
                    publisher.publish(_weights(float(version)), version)
            return copy(*where)

        monkeypatch.setattr(os, "preadv", meanwhile)
        buffer = WeightBuffer(lambda _, published: torch.float64)
        with pytest.raises(WeightsSupersededError, match="holds version 3"):
            buffer.read(manifest)
        assert calls[0] > 3
        with pytest.raises(WeightsReadError, match="no complete version"):
            next(buffer.tensors())
