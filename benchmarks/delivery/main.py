"""What it costs to bring a finished trajectory from its generator to the trainer.

    python -m benchmarks.delivery [--quick] [--json FILE]

Six paths run in turns in one process, with trajectories of 64 to 32,000 tokens:

    bare     encode the message, decode it
    digest   bare, and the digest twice: for the generator's report and in the trainer
    checks   digest, and the trainer's intake: order, report, all that training needs
    ipc      bare, over an ipc socket without CURVE
    curve    bare, over `Line` and `Hub`, which use CURVE
    whole    checks over `Line` and `Hub`: what a run does

The times are CPU time of all threads in the cheapest round, so that other work on the machine
counts little; wall time is printed too. The floor is what `whole` cannot avoid: to encrypt and
decrypt the bytes (libsodium's own speed), to digest them twice, and to copy them twice.

Then another process sends, and this one takes in as a rank of the trainer does: receive, compare,
queue, acknowledge. ZeroMQ's thread decrypts, the main thread does the rest. With a core for each,
the busier one limits the rank. `--part intake` does this only, over loopback TCP too: trajectories
alone and as the groups of eight in which a generator sends them, with CURVE and, in this benchmark
only, without. `intake_mb_per_s` is what arrives, is compared and is acknowledged in a second.
"""

import asyncio
import ctypes
import hashlib
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from rich.table import Table

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.learner import check_trajectory
from asyncrl.trainer_process.delivery_check import GroupQueue, Intake
from asyncrl.wire import Hub, Line, RunKey, RuntimeDirectory
from asyncrl.wire.messages.data import (
    Received,
    TrajectoryDelivery,
    decode_trajectory,
    digest_of,
    encode_trajectory,
)
from asyncrl.wire.messages.to_trainer import Expect, ExpectedSample
from asyncrl.wire.transport.outbox import join, split
from benchmarks.delivery.sending import (
    GROUP,
    NAME,
    SECONDS,
    VOCAB,
    Way,
    delivery_of,
    sample_of,
    send,
    trajectory_of,
)
from benchmarks.harness import parser_of, pick, report, table
from benchmarks.plain_sockets import without_curve

MAX_BYTES = 64 << 20
"""Longest message; far above the longest of the benchmark."""


class TrainerEnd:
    """The intake and the queue of a trainer at version 0, which takes each group at once."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._queue = GroupQueue(GROUP)
        self._intake = Intake(
            self._queue, lambda one: check_trajectory(one, VOCAB, 0), steps=1, functions=1
        )
        self._trajectory = trajectory
        self._ordered = 0

    def order(self) -> Trajectory:
        """The next sample, which is reported and ordered."""
        trajectory = replace(self._trajectory, id=sample_of(self._ordered))
        self._ordered += 1
        digest = digest_of(encode_trajectory(trajectory, reward=0.0, step=0))
        expected = ExpectedSample(trajectory.id, len(trajectory.tokens), 0, digest)
        for _ in self._intake.expect(Expect(0, NAME, (expected,)), next_step=0).here:
            raise AssertionError("nothing was delivered yet")
        return trajectory

    def take_in(self, delivery: TrajectoryDelivery) -> None:
        """Keep a delivery that was ordered. Raises DeliveryNotKept."""
        if not self._intake.receive(NAME, delivery, next_step=0):
            raise AssertionError(f"sample {delivery.sample} was not ordered")
        self._queue.take(0, allowed=None)


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


def take_in(tokens: int, count: int, way: Way) -> Rank:
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
        async with asyncio.timeout(SECONDS):
            await _receive(hub, end)
            began = _clocks()
            for _ in range(count - 1):
                await _receive(hub, end)
            wall, main, cpu = (
                (now - then) / (count - 1) * 1e6 for now, then in zip(_clocks(), began, strict=True)
            )
        await asyncio.to_thread(sender.join, SECONDS)
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


TOKENS = (64, 1_000, 8_000, 32_000)
NEEDED_PER_S = 12_800
"""Samples per second of 1,000 GPUs with 256 samples in flight each, of 20 s (architecture.md)."""


class Effort(NamedTuple):
    rounds: int
    megabytes: float
    """That each path delivers in each round, but at most 400 trajectories."""
    lengths: tuple[int, ...] = TOKENS


QUICK, FULL, SMOKE = Effort(12, 3.0), Effort(40, 20.0), Effort(1, 0.001, TOKENS[:1])


@dataclass(frozen=True)
class Result:
    """Measurements of one length; all times in microseconds per trajectory."""

    tokens: int
    size: int
    """Bytes of its message."""
    cpu_us: dict[str, float]
    """By path: CPU time in its cheapest round."""
    wall_us: dict[str, float]
    """By path: wall time in its fastest round."""
    median_us: dict[str, float]
    """By path: the median of the CPU time of all rounds."""
    stage_us: dict[str, float]
    floor_parts_us: dict[str, float]
    """What the path needs twice, once each."""
    rank: Rank

    @property
    def floor_us(self) -> float:
        """CPU time that the whole path cannot avoid."""
        return 2 * sum(self.floor_parts_us.values())

    @property
    def ranks_needed(self) -> float:
        """Ranks of the trainer that take in what 1,000 GPUs generate."""
        return NEEDED_PER_S / self.rank.per_s


def measure(tokens: int, effort: Effort) -> Result:
    rounds = effort.rounds
    trajectory = trajectory_of(tokens)
    size = len(msgspec.msgpack.encode(delivery_of(trajectory)))
    repeats = max(2, min(400, int(effort.megabytes * 1e6 / size)))
    times = asyncio.run(compare_paths(trajectory, repeats=repeats, rounds=rounds))
    return Result(
        tokens,
        size,
        cpu_us={name: min(cpu for _, cpu in each) for name, each in times.items()},
        wall_us={name: min(wall for wall, _ in each) for name, each in times.items()},
        median_us={name: statistics.median(cpu for _, cpu in each) for name, each in times.items()},
        stage_us=stages(trajectory, repeats, rounds),
        floor_parts_us=floor(size, repeats, rounds),
        rank=take_in(tokens, count=max(2 * GROUP, repeats * min(rounds, 8)), way=Way()),
    )


def ratios_of(results: list[Result]) -> dict[str, float]:
    """By name, with the number of tokens."""
    ratios: dict[str, float] = {}
    for r in results:
        name, whole = f"{r.tokens}", r.cpu_us["whole"]
        ratios[f"delivery_whole_over_curve_{name}"] = whole / r.cpu_us["curve"]
        ratios[f"delivery_whole_over_ipc_{name}"] = whole / r.cpu_us["ipc"]
        ratios[f"delivery_whole_over_floor_{name}"] = whole / r.floor_us
        ratios[f"delivery_ranks_for_1000_gpus_{name}"] = r.ranks_needed
    return ratios


def tables(results: list[Result]) -> list[Table]:
    """The paths, the stages, and one rank."""
    heads = [(f"{r.tokens:,}", f"{r.size:,}") for r in results]
    each = list(zip(heads, results, strict=True))
    first = results[0]
    return [
        table(
            "delivery: CPU µs per trajectory (wall µs)",
            ("tokens", "bytes", *PATHS, "floor"),
            (
                (*head, *(f"{r.cpu_us[n]:.0f} ({r.wall_us[n]:.0f})" for n in PATHS), r.floor_us)
                for head, r in each
            ),
        ),
        table(
            "stages without sockets: CPU µs per trajectory; in the floor: µs once",
            ("tokens", "bytes", *first.stage_us, *(f"floor: {n}" for n in first.floor_parts_us)),
            ((*head, *r.stage_us.values(), *r.floor_parts_us.values()) for head, r in each),
        ),
        table(
            f"one rank of the trainer; 1,000 GPUs finish {NEEDED_PER_S:,} samples/s",
            "tokens,bytes,wall µs,main µs,I/O µs,samples/s,ranks for 1,000 GPUs",
            (
                (*head, r.rank.wall_us, r.rank.main_us, r.rank.io_us, r.rank.per_s, r.ranks_needed)
                for head, r in each
            ),
        ),
    ]


WAYS = {
    "alone": Way(tcp=True),
    "groups": Way(tcp=True, together=GROUP),
    "groups, plain": Way(tcp=True, curve=False, together=GROUP),
}
"""Over TCP."""


def intake(effort: Effort) -> tuple[Table, list[dict[str, float | str]], dict[str, float]]:
    """What one intake takes in over loopback TCP: a table, the numbers, and ratios."""
    shown, rows, ratios = [], list[dict[str, float | str]](), dict[str, float]()
    for tokens in effort.lengths:
        for name, way in WAYS.items():
            size = 9 * tokens + 1000
            count = GROUP * max(8, min(500, int(effort.megabytes * effort.rounds * 1e6 / size / 8)))
            rank = take_in(tokens, count, way)
            rows.append({"tokens": tokens, "way": name, **asdict(rank)})
            times = (rank.wall_us, rank.main_us, rank.io_us, rank.mb_per_s, rank.mb_per_s_of_cores)
            shown.append((name, f"{tokens:,}", f"{rank.bytes_each:,}", *times))
            key = f"intake_mb_per_s_{name.replace(', ', '_')}_{tokens}"
            ratios[key] = rank.mb_per_s_of_cores
    made = table(
        "one intake over loopback TCP, with acknowledgement",
        "sent,tokens,bytes,wall µs,main µs,I/O µs,MB/s measured,MB/s with a core each",
        shown,
    )
    return made, rows, ratios


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "fewer rounds")
    parser.add_argument("--part", choices=("paths", "intake"), help="only this part")
    options = parser.parse_args(arguments)
    effort = pick(options, FULL, QUICK, SMOKE)
    raw: dict[str, Any] = {"needed_per_s": NEEDED_PER_S}
    ratios: dict[str, float] = {}
    shown: list[Table] = []
    if options.part != "intake":
        results = [measure(tokens, effort) for tokens in effort.lengths]
        raw["lengths"], ratios = [asdict(r) for r in results], ratios_of(results)
        shown = tables(results)
    if options.part != "paths":
        made, raw["intake"], found = intake(effort)
        shown.append(made)
        ratios |= found
    report(options, "delivery", raw, ratios, *shown)
    return 0
