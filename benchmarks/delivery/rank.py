"""What one rank of the trainer takes in from another process."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from dataclasses import dataclass, replace

import msgspec

from asyncrl.wire import Hub, Line, RunKey, RuntimeDirectory
from asyncrl.wire.messages.data import Received, TrajectoryDelivery
from asyncrl.wire.transport.keys import LineKeys
from asyncrl.wire.transport.outbox import ONE_PART
from benchmarks.delivery.ends import (
    MAX_BYTES,
    NAME,
    WINDOW,
    TrainerEnd,
    delivery_of,
    sample_of,
    trajectory_of,
)
from benchmarks.plain_sockets import without_curve

_SECONDS = 300


@dataclass(frozen=True)
class Way:
    tcp: bool = False
    """Over loopback TCP; otherwise over ipc."""
    curve: bool = True
    together: int = 1
    """Trajectories that leave in one turn of the generator's event loop."""


@dataclass(frozen=True)
class Rank:
    """Microseconds per trajectory of a process that takes trajectories in."""

    wall_us: float
    main_us: float
    """CPU time of the main thread, which decodes and compares."""
    io_us: float
    """CPU time of ZeroMQ's thread, which decrypts."""
    bytes_each: int = 0
    """Of a trajectory's message."""

    @property
    def per_s(self) -> float:
        """Trajectories per second, with a core for each of the two threads."""
        return 1e6 / max(self.main_us, self.io_us)

    @property
    def mb_per_s(self) -> float:
        """Megabytes per second, as measured, with what else the machine did."""
        return self.bytes_each / self.wall_us

    @property
    def mb_per_s_of_cores(self) -> float:
        """Megabytes per second with a core for each of the two threads."""
        return self.bytes_each / max(self.main_us, self.io_us)


def take_in(tokens: int, count: int, way: Way = Way()) -> Rank:
    """Take in what another process sends as fast as it can."""
    with without_curve(enabled=not way.curve):
        return asyncio.run(_take_in(tokens, count, way))


async def _take_in(tokens: int, count: int, way: Way) -> Rank:
    trajectory = trajectory_of(tokens)
    end = TrainerEnd(trajectory)
    for _ in range(count):
        end.order()
    key, folder = RunKey.new(), RuntimeDirectory()
    address = "tcp://127.0.0.1:*" if way.tcp else folder.address("data")
    hub: Hub[TrajectoryDelivery] = Hub(
        address, key.hub("data"), TrajectoryDelivery, max_bytes=MAX_BYTES
    )
    sender = multiprocessing.get_context("spawn").Process(
        target=send, args=(hub.address, key.line("data", NAME), tokens, count, way)
    )
    sender.start()
    try:
        async with asyncio.timeout(_SECONDS):
            await _receive(hub, end)
            began = _clocks()
            for _ in range(count - 1):
                await _receive(hub, end)
            wall, main, cpu = (
                (now - then) / (count - 1) * 1e6 for now, then in zip(_clocks(), began, strict=True)
            )
        await asyncio.to_thread(sender.join, _SECONDS)
    finally:
        sender.kill()
        hub.close()
        folder.close()
    io = max(0.0, cpu - main)  # the kernel adds up other threads' time by ticks
    return Rank(wall, main, io, len(msgspec.msgpack.encode(delivery_of(trajectory))))


async def _receive(hub: Hub[TrajectoryDelivery], end: TrainerEnd) -> None:
    peer, delivery = await hub.receive()
    end.take_in(delivery)
    hub.send_soon(peer, Received(delivery.sample))


def _clocks() -> tuple[float, float, float]:
    return time.perf_counter(), time.thread_time(), time.process_time()


def send(address: str, keys: LineKeys, tokens: int, count: int, way: Way) -> None:
    """Deliver `count` trajectories, with WINDOW of them unacknowledged. Runs in its own process."""

    async def deliver() -> None:
        line: Line[Received] = Line(address, keys, Received, together_bytes=ONE_PART)
        trajectory = trajectory_of(tokens)
        for index in range(count + WINDOW):
            if index >= WINDOW and index - WINDOW < count:
                await line.receive_within(_SECONDS, what="an acknowledgement")
            if index < count:
                line.send_soon(delivery_of(replace(trajectory, id=sample_of(index))))
                if index % way.together == way.together - 1:
                    await asyncio.sleep(0)
        line.close()

    with without_curve(enabled=not way.curve):
        asyncio.run(deliver())
