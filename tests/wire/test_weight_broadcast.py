"""Broadcast weights: what arrives is the version, bit for bit, or the file is read instead.

The members are threads of the test and, in one test, processes. They use gloo on loopback.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch
from broadcast_member import Command, Report
from broadcast_trainer import CHUNK, LIMITS, SECONDS, holds, read_all, trainer, weights

from asyncrl.wire.errors import WeightsReadError, WeightsSupersededError
from asyncrl.wire.records.wrong_policy import compare_weights
from asyncrl.wire.weights import reader
from asyncrl.wire.weights.broadcast import sending
from asyncrl.wire.weights.broadcast.groups import GlooGroup, Limits, backend_of
from asyncrl.wire.weights.broadcast.sending import WeightSender
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import Outcome, WeightManifest
from asyncrl.wire.weights.reader import WeightBuffer
from asyncrl.wire.weights.writer import WeightPublisher

PATIENCE = 0.3
"""Of a sender that waits for somebody who never comes."""


def test_all_members_receive_each_version_in_one_broadcast_of_one_group(
    closing: ExitStack, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    of = trainer(closing, tmp_path, members=2)
    same, other = WeightBuffer(), WeightBuffer(lambda _, dtype: torch.float64)
    for version in (1, 2, 3):
        manifest = of.publish(version, readable=False)
        assert read_all(pool, [same, other], manifest) == [None, None]
        assert holds(same, version)
        for name, tensor in other.tensors():  # it was converted on its way
            want = dict(weights(version))[name]
            assert torch.equal(tensor, want.to(tensor.dtype))
    assert of.outcomes_are("whole", "whole", "whole")
    assert of.sender._generation == 1
    assert listening_addresses() == {"127.0.0.1"}, "sockets without keys, on loopback only"


def test_a_joiner_gets_a_broadcast_of_its_own_and_then_takes_part(
    closing: ExitStack, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    of = trainer(closing, tmp_path, members=1)
    first, joiner = WeightBuffer(), WeightBuffer()
    manifest = of.publish(1, readable=False)
    for buffer in (first, joiner):
        assert read_all(pool, [buffer], manifest) == [None]
    assert of.outcomes_are("whole", "whole")
    manifest = of.publish(2, readable=False)
    assert read_all(pool, [first, joiner], manifest) == [None, None]
    assert of.outcomes_are("whole", "whole", "whole")
    assert holds(joiner, 2)


def test_a_version_that_is_overwritten_meanwhile_arrives_at_nobody(
    closing: ExitStack,
    pool: ThreadPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = trainer(closing, tmp_path, members=2)
    buffers = [WeightBuffer(), WeightBuffer()]
    assert read_all(pool, buffers, of.publish(1)) == [None, None]
    manifest = of.publish(2)
    newest: list[WeightManifest] = []

    def after(chunk: int) -> None:
        if chunk == 3 and not newest:
            of.publish(3)
            newest.append(of.publish(4, readable=False))

    on_each_chunk(monkeypatch, after)
    for error in read_all(pool, buffers, manifest):
        assert isinstance(error, WeightsSupersededError)
        assert "overwritten while they were broadcast" in str(error)
    with pytest.raises(WeightsReadError, match="no complete version"):
        list(buffers[0].tensors())
    assert read_all(pool, buffers, newest[0]) == [None, None]
    assert all(holds(buffer, 4) for buffer in buffers)
    assert of.outcomes_are("whole", "overwritten", "whole")
    assert of.sender._generation == 1  # the group is still good


def test_who_asks_for_an_older_version_reads_its_file(
    closing: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of = trainer(closing, tmp_path, members=1)
    buffer, older = WeightBuffer(), of.publish(1)
    of.publish(2)
    buffer.read(older)
    assert holds(buffer, 1)
    assert "the newest is version 2; reading" in caplog.text
    assert not of.outcomes


def test_a_member_that_stops_is_left_behind_and_holds_up_nobody(
    closing: ExitStack,
    pool: ThreadPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others read the file; the next broadcast is without it, and it reads the file too."""
    of = trainer(closing, tmp_path, members=2, limits=Limits(window=SECONDS, chunk=1.0))
    healthy, stopped = WeightBuffer(), WeightBuffer()
    manifest = of.publish(1)
    go_on = threading.Event()
    closing.callback(go_on.set)
    room = reader._Landing.room

    def slow(self: reader._Landing, span: slice, device: torch.device) -> torch.Tensor | None:
        if self.memory is stopped._memory:
            assert go_on.wait(SECONDS)
        return room(self, span, device)

    monkeypatch.setattr(reader._Landing, "room", slow)
    stuck = pool.submit(stopped.read, manifest)
    assert read_all(pool, [healthy], manifest) == [None]
    assert holds(healthy, 1)
    assert of.outcomes_are("broken")
    of.sender._meeting._window, of.sender._limits = PATIENCE, LIMITS
    assert read_all(pool, [healthy], of.publish(2, readable=False)) == [None]
    assert holds(healthy, 2)
    assert of.outcomes_are("broken", "whole")
    go_on.set()
    assert stuck.exception(SECONDS) is None
    assert holds(stopped, 1)


def test_no_sender_listens_any_longer(
    closing: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of = trainer(closing, tmp_path, members=1)
    buffer, manifest = WeightBuffer(), of.publish(1)
    of.sender.close()
    buffer.read(manifest)
    assert holds(buffer, 1)
    assert "no sender of weights listens at" in caplog.text


def test_a_chunk_that_is_damaged_on_its_way_is_found(
    closing: ExitStack,
    pool: ThreadPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One bit. All members read the file: the group cannot go on without one of them."""
    of = trainer(closing, tmp_path, members=2)
    begin, begun = GlooGroup.begin, itertools.count()

    def damaged(self: GlooGroup, part: torch.Tensor) -> None:
        is_sender = threading.current_thread().name == "weights-broadcast"
        if is_sender and part.dtype == torch.uint8 and next(begun) == 2:
            part[4321] ^= 1
        begin(self, part)

    monkeypatch.setattr(GlooGroup, "begin", damaged)
    buffers = [WeightBuffer(), WeightBuffer()]
    assert read_all(pool, buffers, of.publish(1)) == [None, None]
    assert all(holds(buffer, 1) for buffer in buffers)
    assert of.outcomes_are("broken")


def test_weights_that_are_damaged_before_they_are_sent_have_another_fingerprint(
    closing: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines are compared with the trainer after each installation."""
    of = trainer(closing, tmp_path, members=1)
    fill = sending.fill

    def damaged(target: memoryview, descriptor: int, offset: int) -> None:
        fill(target, descriptor, offset)
        target[1000] ^= 1

    monkeypatch.setattr(sending, "fill", damaged)
    buffer, manifest = WeightBuffer(), of.publish(1, readable=False)
    buffer.read(manifest)
    assert manifest.fingerprint is not None
    before = 0, fingerprint(weights(0))
    found = compare_weights(
        "g", 1, expected=manifest.fingerprint, found=fingerprint(buffer.tensors()), before=before
    )
    assert found is not None
    assert "big" in found.text


def test_a_member_process_is_killed_during_a_broadcast(
    closing: ExitStack, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """The other one hears of it, and reads the file; the version after has a new group."""
    members = [process(closing) for _ in range(2)]
    of = trainer(closing, tmp_path, members=2, limits=Limits(window=SECONDS))
    manifest = of.publish(1, readable=False)
    for report in [pool.submit(ask, one, Command(manifest)) for one in members]:
        assert received(report, manifest) == []
    survivor, killed = members
    manifest = of.publish(2)
    report = pool.submit(ask, survivor, Command(manifest))
    with pytest.raises(msgspec.DecodeError):  # nothing comes
        ask(killed, Command(manifest, die_at=5))
    assert killed.wait(SECONDS) == -9
    (warning,) = received(report, manifest)
    assert warning.startswith("weights of version 2 did not arrive by broadcast: ")
    assert of.outcomes_are("whole", "broken")

    manifest, joiner = of.publish(3, readable=False), WeightBuffer()
    report = pool.submit(ask, survivor, Command(manifest))
    joiner.read(manifest)
    assert received(report, manifest) == []
    assert holds(joiner, 3)
    assert of.outcomes_are("whole", "broken", "whole")


def test_the_backend_is_nccl_where_each_member_has_a_gpu_of_its_own() -> None:
    assert backend_of(["GPU-a", "GPU-b", "GPU-c"]) == "nccl"
    assert backend_of(["GPU-a", "GPU-b", "GPU-a"]) == "gloo"  # colocated
    assert backend_of(["GPU-a", "cpu"]) == "gloo"
    assert backend_of(["cpu", "cpu"]) == "gloo"


@pytest.mark.gpu
def test_nccl(closing: ExitStack, pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    """Two GPUs: one sends, one receives. Never run so far."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    outcomes: list[Outcome] = []
    publisher = WeightPublisher(tmp_path, "trainer")
    closing.callback(publisher.close)
    sender = WeightSender(
        "127.0.0.1", members=1, device=torch.device("cuda:0"), note=outcomes.append
    )
    closing.callback(sender.close)
    buffer = WeightBuffer(device=torch.device("cuda:1"))
    for version in (1, 2):
        manifest = sender.publish(publisher.publish(weights(version), version))
        manifest = msgspec.structs.replace(manifest, path="/nowhere")
        assert read_all(pool, [buffer], manifest) == [None]
        want = dict(weights(version))
        assert all(torch.equal(tensor.cpu(), want[name]) for name, tensor in buffer.tensors())
    assert outcomes == ["whole", "whole"]


def listening_addresses() -> set[str]:
    """Of this process's TCP sockets."""
    mine, found = set(), set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            mine.add(str(descriptor.readlink()))
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in mine:
                host = bytes.fromhex(local.partition(":")[0])
                found.add(str(ipaddress.ip_address(host[::-1])) if family == "tcp" else local)
    return found


def on_each_chunk(monkeypatch: pytest.MonkeyPatch, after: Callable[[int], None]) -> None:
    """Call something in the sender's thread, with the chunk's number, before it is checked."""
    fill = sending.fill

    def filled(target: memoryview, descriptor: int, offset: int) -> None:
        fill(target, descriptor, offset)
        after(offset // CHUNK)

    monkeypatch.setattr(sending, "fill", filled)


def process(closing: ExitStack) -> subprocess.Popen[str]:
    started = subprocess.Popen(
        [sys.executable, "-m", "broadcast_member"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    closing.enter_context(started)
    closing.callback(started.kill)
    return started


def ask(member: subprocess.Popen[str], command: Command) -> Report:
    assert member.stdin is not None
    assert member.stdout is not None
    member.stdin.write(msgspec.json.encode(command).decode() + "\n")
    member.stdin.flush()
    line = member.stdout.readline()
    return msgspec.json.decode(member.stdout.readline() if line == "ready\n" else line, type=Report)


def received(report: Future[Report], manifest: WeightManifest) -> list[str]:
    """What the member warned of, if it has the version."""
    found = report.result(SECONDS)
    assert manifest.fingerprint is not None
    assert (found.version, found.digest) == (manifest.policy_version, manifest.fingerprint.whole)
    return found.warnings
