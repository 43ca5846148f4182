"""NCCL's groups, against a stand-in of torch's `ProcessGroupNCCL` and of its `Work`.

The stand-in behaves as torch 2.13's, as far as `NcclGroup` uses it (ProcessGroupNCCL.hpp, .cpp):
`is_success` raises, `is_completed` is also true of a work that has failed, `exception` gives that
error or None, the first broadcast connects the members, and after `abort` everything raises. Bytes
go by gloo. Whole rounds run: a sender, its members, and the files that they fall back to.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed
from broadcast_trainer import LIMITS, Trainer, holds, read_all, trainer

from asyncrl.wire.errors import GroupBroken
from asyncrl.wire.weights.broadcast import groups, receiving, sending
from asyncrl.wire.weights.broadcast.groups import GlooGroup, NcclGroup
from asyncrl.wire.weights.broadcast.receiving import BroadcastReceiver
from asyncrl.wire.weights.reader import WeightBuffer

CPU = torch.device("cpu")
HUNG, FAILED = "hung", "failed"


class Clock:
    """The time of `groups`."""

    passed = 0.0
    """Seconds beside those that really pass."""

    @staticmethod
    def monotonic() -> float:
        return time.monotonic() + Clock.passed

    sleep = staticmethod(time.sleep)


class Work:
    """Of a broadcast. `fault`: it never ends, and hours pass; or it ended with an error."""

    def __init__(self, inner: Any, fault: str | None) -> None:
        self._inner, self._fault = inner, fault
        self.waited = False

    def drop(self) -> None:
        """Its group was aborted."""
        self._inner = None

    def is_completed(self) -> bool:
        if self._fault == HUNG:
            Clock.passed += 3600
        return self._fault == FAILED or (self._fault is None and self._inner.is_completed())

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def exception(self) -> Exception | None:
        if self._fault == FAILED:
            return torch.distributed.DistBackendError("NCCL error: remote process exited\nmore")
        found: Exception | None = self._inner.exception()
        return found

    def wait(self) -> bool:
        assert self.is_completed(), "it would block without a limit"
        self.waited = self.exception() is None
        return True


class Nccl:
    """Torch's `ProcessGroupNCCL`. `faults` holds those of its next works, by rank."""

    made: ClassVar[list[Nccl]]
    faults: ClassVar[dict[int, list[str | None]]]
    unconnected = 0
    """Groups whose members do not find each other, from now on."""

    class Options:
        def __init__(self) -> None:
            self._timeout: Any = None
            self.config = SimpleNamespace(blocking=1)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert options.config.blocking == 0
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        self._arguments = store, rank, size
        self._gloo: Any = None
        self.rank, self.aborted, self.works = rank, 0, list[Work]()
        self._first = True
        type(self).made.append(self)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        if self.aborted:
            raise torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0")
        if self._first:
            self._first = False
            if type(self).unconnected:
                raise torch.distributed.DistBackendError("NCCL timeout in communicator init")
            self._gloo = GlooGroup(*self._arguments, "127.0.0.1", LIMITS)._gloo
        waiting = type(self).faults.get(self.rank)
        work = Work(self._gloo.broadcast(tensor, root), waiting.pop(0) if waiting else None)
        self.works.append(work)
        return work

    def abort(self) -> None:
        self.aborted += 1
        if self._gloo is not None:
            self._gloo.abort()
        # Its connections close when nothing refers to them: so the others hear of it.
        self._gloo = None
        for work in self.works:
            work.drop()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Nccl]]:
    """In the place of torch's; every process has a GPU of its own, which is the CPU."""

    class Made(Nccl):
        made: ClassVar[list[Nccl]] = []
        faults: ClassVar[dict[int, list[str | None]]] = {}

    number = itertools.count()
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Made, raising=False)
    for module in (sending, receiving):
        monkeypatch.setattr(module, "name_of_device", lambda _device: f"GPU-{next(number)}")
    monkeypatch.setattr(groups, "time", Clock)
    stream = SimpleNamespace(wait_stream=lambda _other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_NONBLOCKING_TIMEOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield Made
    assert all(one.aborted for one in Made.made), "a communicator was left"


def round_of(closing: ExitStack, folder: Path) -> tuple[Trainer, list[WeightBuffer]]:
    """A trainer and its two members, who leave before it closes."""
    of = trainer(closing, folder, members=2)
    buffers = [WeightBuffer(), WeightBuffer()]
    for buffer in buffers:
        buffer._receiver = BroadcastReceiver(CPU, LIMITS)
        closing.callback(buffer._receiver.leave)
    return of, buffers


def test_versions_arrive_by_one_group(
    nccl: type[Nccl], closing: ExitStack, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    of, buffers = round_of(closing, tmp_path)
    for version in (1, 2, 3):
        manifest = of.publish(version, readable=False)
        assert read_all(pool, buffers, manifest) == [None, None]
        assert all(holds(buffer, version) for buffer in buffers)
    assert of.outcomes_are("whole", "whole", "whole")
    assert sorted(one.rank for one in nccl.made) == [0, 1, 2]
    assert all(work.waited for one in nccl.made for work in one.works)
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "20"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def test_a_user_bounds_the_connection_otherwise(
    nccl: type[Nccl], closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "300")
    store = torch.distributed.HashStore()
    group = NcclGroup(store, 0, 1, CPU, LIMITS)
    closing.callback(group.close)
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "300"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (FAILED, "a broadcast failed: NCCL error: remote process exited"),
        (HUNG, "a broadcast did not end within 10 s"),
    ],
)
def test_a_broadcast_that_breaks_is_said_once_and_the_next_has_a_new_group(
    nccl: type[Nccl],
    closing: ExitStack,
    pool: ThreadPoolExecutor,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fault: str,
    said: str,
) -> None:
    caplog.set_level(logging.INFO, "asyncrl.wire")
    of, buffers = round_of(closing, tmp_path)
    outcomes = []
    for version, broken in enumerate((True, True, False, True), start=1):
        # Of rank 1: that which connects the members where the group is new, then a chunk's word.
        new = version != 4
        nccl.faults[1] = [*([None] if new else []), fault] if broken else []
        assert read_all(pool, buffers, of.publish(version)) == [None, None]
        assert all(holds(buffer, version) for buffer in buffers), "from the file where it broke"
        outcomes.append("broken" if broken else "whole")
        assert of.outcomes_are(*outcomes)
    assert len([one for one in nccl.made if one.rank == 0]) == 3
    lines = [(one.levelname, one.getMessage()) for one in caplog.records]
    for first in ("the broadcast of version", "weights of version"):
        ours = [(level, line) for level, line in lines if line.startswith(first)]
        levels = {(line.removeprefix(first).split()[0], level) for level, line in ours}
        assert levels == {("1", "WARNING"), ("2", "INFO"), ("4", "WARNING")}
        assert all("later" in line for _, line in ours)
    assert {line.split()[3] for _, line in lines if said in line} >= {"1", "2", "4"}


def test_members_that_nccl_does_not_connect_cost_two_versions_their_time(
    nccl: type[Nccl],
    closing: ExitStack,
    pool: ThreadPoolExecutor,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each of them some `Limits.form`; from then on files are read at once."""
    nccl.unconnected = 1
    of, buffers = round_of(closing, tmp_path)
    for version in range(1, 5):
        assert read_all(pool, buffers, of.publish(version)) == [None, None]
        assert all(holds(buffer, version) for buffer in buffers)
    assert of.outcomes_are("broken", "broken")
    assert len([one for one in nccl.made if one.rank == 0]) == 2
    lines = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert sum("NCCL could not connect the members 2 times in a row" in one for one in lines) == 1
    assert sum("NCCL timeout in communicator init" in one for one in lines) == 3


def test_an_aborted_group_can_neither_begin_nor_be_aborted_again(nccl: type[Nccl]) -> None:
    group = NcclGroup(torch.distributed.HashStore(), 0, 1, CPU, LIMITS)
    group.close()
    group.close()
    assert nccl.made[0].aborted == 1
    with pytest.raises(GroupBroken, match="it was closed"):
        group.begin(torch.zeros(1))
