"""Broadcasts that break off: for a slow member, a receiver's error, a word out of step."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from broadcast_trainer import CHUNK, SECONDS, holds, read_all, trainer

from asyncrl.wire.weights import reader
from asyncrl.wire.weights.broadcast import sending
from asyncrl.wire.weights.broadcast.groups import Limits
from asyncrl.wire.weights.broadcast.store import CheckIn, Refusal
from asyncrl.wire.weights.layout import ControlCode
from asyncrl.wire.weights.reader import WeightBuffer


def test_a_member_that_takes_each_chunk_slowly_holds_up_nobody_for_long(
    closing: ExitStack,
    pool: ThreadPoolExecutor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """30 chunks, each far within its own limit, and together beyond that of the whole."""
    limits = Limits(window=SECONDS, chunk=SECONDS, whole=0.5)
    of = trainer(closing, tmp_path, members=2, limits=limits)
    healthy, slow = WeightBuffer(), WeightBuffer()
    room, hurry = reader._Landing.room, threading.Event()
    closing.callback(hurry.set)

    def slowly(self: reader._Landing, span: slice, device: torch.device) -> torch.Tensor | None:
        if self.memory is slow._memory:
            hurry.wait(0.1)
        return room(self, span, device)

    monkeypatch.setattr(reader._Landing, "room", slowly)
    assert read_all(pool, [healthy, slow], of.publish(1)) == [None, None]
    assert holds(healthy, 1)
    assert holds(slow, 1)
    assert of.outcomes_are("broken")
    assert "of 30 chunks took more than 0.5 s" in caplog.text


def test_an_error_of_the_receiver_leaves_the_group(
    closing: ExitStack, pool: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its next broadcast would begin in the middle of this one."""
    of = trainer(closing, tmp_path, members=2)
    healthy, full = WeightBuffer(), WeightBuffer()
    room = reader._Landing.room

    def failing(self: reader._Landing, span: slice, device: torch.device) -> torch.Tensor | None:
        if self.memory is full._memory and span.start >= 3 * CHUNK:
            raise MemoryError("there is no room")
        return room(self, span, device)

    monkeypatch.setattr(reader._Landing, "room", failing)
    nothing, error = read_all(pool, [healthy, full], of.publish(1))
    assert nothing is None
    assert holds(healthy, 1)
    assert isinstance(error, MemoryError)
    assert full._receiver._group is None
    monkeypatch.setattr(reader._Landing, "room", room)
    manifest = of.publish(2, readable=False)
    assert read_all(pool, [healthy, full], manifest) == [None, None]
    assert holds(healthy, 2)
    assert holds(full, 2)
    assert of.outcomes_are("broken", "whole")


@pytest.mark.parametrize(("version", "index"), [(2, 3), (1, 4)])
def test_a_word_of_another_version_or_chunk_breaks_the_broadcast(
    closing: ExitStack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: int,
    index: int,
) -> None:
    of = trainer(closing, tmp_path, members=1)
    said = sending._said

    def wrong(word: ControlCode, _version: int, chunk: int, checksum: torch.Tensor) -> torch.Tensor:
        return said(word, *((version, index) if chunk == 3 else (1, chunk)), checksum)

    monkeypatch.setattr(sending, "_said", wrong)
    buffer = WeightBuffer()
    buffer.read(of.publish(1))
    assert holds(buffer, 1)
    assert of.outcomes_are("broken")
    assert f"announced 1 of version {version} before chunk {index} instead of 1" in caplog.text


def test_what_dead_members_left_at_the_desk_is_deleted(
    closing: ExitStack, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    of = trainer(closing, tmp_path, members=1)
    desk = of.sender._desk
    dead = CheckIn("dead", 1, 1, 0, "cpu")
    desk.answer(dead, Refusal("it does not read this"))
    desk._answered[0] = -SECONDS, desk._answered[0][1]  # long ago
    first, joiner = WeightBuffer(), WeightBuffer()
    manifest = of.publish(1, readable=False)
    assert read_all(pool, [first], manifest) == [None]
    assert read_all(pool, [joiner], manifest) == [None]
    assert of.outcomes_are("whole", "whole")
    assert {key.partition("/")[0] for key in desk._store.list_keys()} == {"group-2"}
