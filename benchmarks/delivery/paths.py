"""The paths that are compared, their stages, and the floor below which they cannot get."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.objective.group_check import check_trajectory
from asyncrl.wire import Hub, Line, RunKey, RuntimeDirectory
from asyncrl.wire.messages.data import Received, TrajectoryDelivery
from asyncrl.wire.messages.frames import decode_trajectory, digest_of, encode_trajectory
from asyncrl.wire.transport.outbox import join, split
from benchmarks.delivery.ends import MAX_BYTES, NAME, VOCAB, TrainerEnd, delivery_of

PATHS = ("bare", "digest", "checks", "ipc", "curve", "whole")


class Paths:
    def __init__(
        self, trajectory: Trajectory, folder: RuntimeDirectory, closing: ExitStack
    ) -> None:
        key = RunKey.new()
        self._trajectory = trajectory
        self._decoder = msgspec.msgpack.Decoder(TrajectoryDelivery)
        self._hub: Hub[TrajectoryDelivery] = Hub(
            folder.address("data"), key.hub("data"), TrajectoryDelivery, max_bytes=MAX_BYTES
        )
        self._line: Line[Received] = Line(folder.address("data"), key.line("data", NAME), Received)
        closing.callback(self._hub.close)
        closing.callback(self._line.close)
        context = zmq.asyncio.Context.instance()
        self._plain_hub, self._plain_line = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        self._plain_hub.bind(folder.address("plain"))
        self._plain_line.connect(folder.address("plain"))
        for socket in (self._plain_hub, self._plain_line):
            closing.callback(socket.close, 0)
        self._here, self._there = TrainerEnd(trajectory), TrainerEnd(trajectory)

    def path(self, name: str) -> Callable[[], Awaitable[None]]:
        """The path of this name; each call delivers once."""
        path: Callable[[], Awaitable[None]] = getattr(self, f"_{name}")
        return path

    def _decode(self, body: bytes) -> TrajectoryDelivery:
        delivery = self._decoder.decode(body)
        decode_trajectory(delivery)
        return delivery

    async def _bare(self) -> None:
        self._decode(msgspec.msgpack.encode(delivery_of(self._trajectory)))

    async def _digest(self) -> None:
        digest = digest_of(encode_trajectory(self._trajectory, reward=0.0, step=0))
        delivery = self._decode(msgspec.msgpack.encode(delivery_of(self._trajectory)))
        if digest_of(delivery) != digest:
            raise AssertionError("its contents differ")

    async def _checks(self) -> None:
        body = msgspec.msgpack.encode(delivery_of(self._here.order()))
        self._here.take_in(self._decoder.decode(body))

    async def _ipc(self) -> None:
        body = msgspec.msgpack.encode(delivery_of(self._trajectory))
        await self._plain_line.send_multipart(split(body))
        parts = await self._plain_hub.recv_multipart()
        self._decode(join(parts[1:], max_bytes=MAX_BYTES))

    async def _curve(self) -> None:
        await self._line.send(delivery_of(self._trajectory))
        decode_trajectory((await self._hub.receive())[1])

    async def _whole(self) -> None:
        await self._line.send(delivery_of(self._there.order()))
        self._there.take_in((await self._hub.receive())[1])


async def compare_paths(
    trajectory: Trajectory, *, repeats: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Run the paths in turns; another one begins each round."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in PATHS}
    with ExitStack() as closing:
        folder = RuntimeDirectory()
        closing.callback(folder.close)
        paths = Paths(trajectory, folder, closing)
        for turn in range(rounds + 1):
            first = turn % len(PATHS)
            for name in PATHS[first:] + PATHS[:first]:
                path = paths.path(name)
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(repeats):
                    await path()
                if turn:  # the first round connects and warms up
                    spent = time.perf_counter() - wall, time.process_time() - cpu
                    times[name].append((spent[0] / repeats * 1e6, spent[1] / repeats * 1e6))
    return times


def timed(call: Callable[[], object], repeats: int, rounds: int) -> float:
    """Microseconds of CPU time of a call, in the cheapest round."""
    best = float("inf")
    for _ in range(rounds):
        began = time.thread_time()
        for _ in range(repeats):
            call()
        best = min(best, time.thread_time() - began)
    return best / repeats * 1e6


def stages(trajectory: Trajectory, repeats: int, rounds: int) -> dict[str, float]:
    delivery = delivery_of(trajectory)
    body = msgspec.msgpack.encode(delivery)
    decoder = msgspec.msgpack.Decoder(TrajectoryDelivery)
    received = decoder.decode(body)
    decoded = decode_trajectory(received)
    calls: dict[str, Callable[[], object]] = {
        "arrays to message": lambda: delivery_of(trajectory),
        "message to bytes": lambda: msgspec.msgpack.encode(delivery),
        "bytes to message": lambda: decoder.decode(body),
        "message to arrays": lambda: decode_trajectory(received),
        "check": lambda: check_trajectory(decoded, VOCAB, 0),
        "digest": lambda: digest_of(received),
    }
    return {name: timed(call, repeats, rounds) for name, call in calls.items()}


def floor(size: int, repeats: int, rounds: int) -> dict[str, float]:
    """Microseconds of the work on this many bytes that the whole path cannot avoid."""
    data = np.random.default_rng(0).bytes(size)
    target = bytearray(size)

    def copy() -> None:
        target[:] = data

    calls: dict[str, Callable[[], object]] = {
        "copy": copy,
        "digest": lambda: hashlib.sha256(data).digest(),
    }
    library = _libsodium()
    if library is not None:
        out, length = ctypes.create_string_buffer(size + 16), ctypes.c_ulonglong(size)
        calls["curve"] = lambda: library.crypto_box_easy_afternm(
            out, data, length, b"n" * 24, b"k" * 32
        )
    return {name: timed(call, repeats, rounds) for name, call in calls.items()}


def _libsodium() -> ctypes.CDLL | None:
    """The library with which ZeroMQ encrypts in this process; None if it is linked statically."""
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    files = [line.split(maxsplit=5)[-1] for line in mapped]  # whose names may hold spaces
    found = next((file for file in files if "libsodium" in file), None)
    return None if found is None else ctypes.CDLL(found)
