"""Attackers: threads that send hostile frames to every socket of a run.

    peers      to the controller, the trainer and the user's socket, with valid keys of names that
               no process has, and with names of processes whose pass they do not have
    strangers  to the same sockets: another key, no encryption, and bytes that are no ZeroMQ
    http       to the metrics port of every process

A thread waits when its target is far behind, so that frames do not pile up in its queues.
"""

import contextlib
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq

from asyncrl.monitoring.metrics.discovery import targets_file
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.runs.directory import read_state
from asyncrl.steering.control_socket import ask, control_key_file
from asyncrl.user_code.process_tree import descendants
from asyncrl.wire import RunKey
from asyncrl.wire.messages import control
from asyncrl.wire.sockets import identify
from asyncrl.wire.transport.keys import LineKeys
from benchmarks.harness import own_bytes
from benchmarks.hostile.frames import Frames
from benchmarks.hostile.victim import CONTROLLER, Order

ROOT = Path(__file__).parents[2]
START_SECONDS = 300.0
"""Longest time for the start of a run and its first steps, and for its end."""
_REFUSED = re.compile(r'asyncrl_frames_refused_total\{.*reason="(\w+)".*\} (\S+)')


class RunError(Exception):
    """A run failed or did not get on. The message quotes the end of its output."""


class Run:
    """`asyncrl run` as a child process; killed at the end if it is still there."""

    def __init__(
        self, config: Path, folder: Path, name: str, settings: Sequence[str], *, garbage: int = 0
    ) -> None:
        self.key = RunKey.new()
        self.folder = folder / name
        self._log = folder / f"{name}.log"
        own = [f"run.name={name}", f"run.directory={folder}", "monitoring.live=plain"]
        order = Order(str(config), [*settings, *own], self.key.secret, garbage)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.hostile.victim", str(os.getpid())],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(order))
        self.process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)

    @property
    def steps(self) -> int:
        return len(read_metrics(self.folder / "metrics.jsonl"))

    def address(self, hub: str) -> str:
        """The address of one of the run's sockets."""
        state = read_state(self.folder)
        if state is None:
            raise RunError(f"{self.folder} has no run.json")
        return state.control_address.rpartition("/")[0] + f"/{hub}"

    def ports(self) -> dict[str, int]:
        try:
            listed = json.loads(targets_file(self.folder).read_text())
        except FileNotFoundError as error:
            raise RunError(
                f"{self.folder.name} serves no metrics: {self.output()[-2000:]}"
            ) from error
        return {
            one["labels"]["instance"]: int(one["targets"][0].rpartition(":")[2]) for one in listed
        }

    def refused(self) -> Counter[str]:
        """Frames that all processes have refused so far, by reason."""
        return sum((self.refused_by(process) for process in self.ports()), Counter())

    def refused_by(self, process: str) -> Counter[str]:
        """Frames that a process has refused so far, by reason."""
        lines = _fetched(f"http://127.0.0.1:{self.ports()[process]}/metrics").splitlines()
        pairs = (match.groups() for line in lines if (match := _REFUSED.match(line)))
        return Counter({reason: int(float(count)) for reason, count in pairs})

    def processes(self) -> set[int]:
        """Ids of the controller and of its children."""
        return {self.process.pid, *descendants(self.process.pid)}

    def memory_mb(self) -> dict[str, float]:
        """Memory that each process has for itself (anonymous pages), in MB."""
        found: dict[str, float] = {}
        for pid in sorted(self.processes()):
            name = _name(pid)
            found[name] = found.get(name, 0.0) + own_bytes(pid) / 1e6
        return found

    def answers(self) -> bool:
        return isinstance(ask(self.folder, control.StatusRequest()), control.StatusReply)

    def stop(self, seconds: float) -> None:
        """Have it finish its step and end. Raises RunError."""
        ask(self.folder, control.StopRequest())
        self.finish(seconds)

    def finish(self, seconds: float) -> None:
        """Wait for its end. Raises RunError if it fails or takes longer."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{self.folder.name} did not end: {self.output()[-2000:]}") from error
        if code:
            raise RunError(f"{self.folder.name} ended with {code}: {self.output()[-4000:]}")

    def wait_for(self, condition: Callable[[], bool], *, seconds: float, what: str) -> None:
        """Wait for a condition. Raises RunError if the run ends first, or after this long."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                raise RunError(f"{self.folder.name} ended before {what}: {self.output()[-4000:]}")
            if time.monotonic() > deadline:
                raise RunError(f"waited {seconds:.0f} s for {what}: {self.output()[-2000:]}")
            time.sleep(0.1)

    def warm_up(self, steps: int) -> None:
        """Wait until so many steps are trained. Raises RunError."""
        self.wait_for(lambda: self.steps >= steps, seconds=START_SECONDS, what=f"{steps} steps")

    def output(self) -> str:
        return self._log.read_text(errors="replace")


def _fetched(url: str) -> str:
    """Read a page. The attack takes most connections of the server, which then closes others."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:  # noqa: S310  (own http URL)
                return str(reply.read().decode())
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(f"waited 60 s for {url}: {error}") from error
            time.sleep(0.2)


def _name(pid: int) -> str:
    """A process's name in the run; `other` for reward workers and helpers."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        if "benchmarks.hostile.victim" in command:
            return CONTROLLER
        if (found := re.search(r'"name":"([\w.-]+)"', command)) is not None:
            return found[1]
    return "other"


PER_CONNECTION = 250
"""Frames of one peer: more than twice of what it takes to be cut off."""
BACKLOG = 20_000
"""Frames that a process may be behind before its attackers wait for it."""
_STILL_SECONDS = 3.0
"""Frames that are not counted for this long were lost with a connection that was closed."""

_HTTP = (b"", b"GET /metrics HTTP/1.1\r\n", b"POST / HTTP/9\r\nContent-Length: 9999999999\r\n")
"""How requests begin."""
_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3"


@dataclass(frozen=True)
class Target:
    hub: str
    process: str
    """That the hub belongs to."""
    key: RunKey


class Pace:
    """How many frames a process has been sent and has refused."""

    def __init__(self, refused: Callable[[], int]) -> None:
        self._refused = refused
        self._started = refused()
        self._lock = threading.Lock()
        self._sent = self._lost = self._looked = 0

    def add(self, frames: int) -> None:
        """Count frames that were sent; wait if the process is far behind."""
        with self._lock:
            self._sent += frames
            if self._sent - self._looked < BACKLOG // 4:
                return
            self._looked = self._sent
        self.settle(BACKLOG)

    def settle(self, backlog: int) -> None:
        """Wait until at most this many frames are neither refused nor lost."""
        counted, since = -1, time.monotonic()
        while True:
            now = self._refused() - self._started
            if self._sent - self._lost - now <= backlog:
                return
            if now != counted:
                counted, since = now, time.monotonic()
            elif time.monotonic() - since > _STILL_SECONDS:
                self._lost = self._sent - now
            time.sleep(0.2)


class Attack:
    """Sends frames to all sockets of a live run."""

    def __init__(self, run: Run, seed: int) -> None:
        self._run = run
        self._seed = seed
        self._ended = threading.Event()
        user = RunKey.read(control_key_file(run.folder))
        self._targets = (
            Target("control", CONTROLLER, run.key),
            Target("data", "trainer", run.key),
            Target("user", CONTROLLER, user),
        )
        self._paces = {name: Pace(self._counter(name)) for name in (CONTROLLER, "trainer")}
        self._names = itertools.count()
        self.sent: Counter[str] = Counter()
        """Frames by way."""

    def _counter(self, process: str) -> Callable[[], int]:
        return lambda: sum(self._run.refused_by(process).values())

    def send(self, frames: int) -> None:
        """Send this many frames; returns when the run has taken them in."""
        before = sum(self.sent.values())
        shares = {"control": 0.45, "data": 0.4, "user": 0.1}
        strangers, http = frames // 50, frames // 100
        with ThreadPoolExecutor(8) as threads:
            jobs = [
                threads.submit(self._peers, target, int(frames * shares[target.hub]))
                for target in self._targets
            ]
            jobs.append(threads.submit(self._strangers, strangers))
            jobs.append(threads.submit(self._http, http))
            for job in jobs:
                job.result()
        rest = frames - (sum(self.sent.values()) - before)
        if rest > 0:
            self._peers(self._targets[0], rest)
        for pace in self._paces.values():
            pace.settle(0)

    def _peers(self, target: Target, count: int) -> None:
        """Connect again and again under new names, and send a few hundred frames each time."""
        frames = Frames(self._seed + 3 + self._targets.index(target))
        address, left = self._run.address(target.hub), count
        while left > 0:
            index = next(self._names)
            keys = target.key.line(target.hub, f"generator-{1000 + index}")
            if index % 7 == 0:  # the name of a process, with the pass of another name
                keys = LineKeys("", keys.hub, b"generator-0" + keys.identity[-16:])
            size = min(left, PER_CONNECTION)
            with _peer(address, keys) as peer:
                for _ in range(size):
                    peer.send_multipart(frames.parts())
            left -= size
            self.sent[target.hub] += size
            self._paces[target.process].add(size)

    def _strangers(self, count: int) -> None:
        """Connections that fail before a frame is read."""
        frames, choose = Frames(self._seed + 1), random.Random(self._seed)
        addresses = [self._run.address(target.hub) for target in self._targets]
        for index in range(count):
            address = addresses[index % len(addresses)]
            if index % 50 == 0:
                self._wrong_key(address, frames, encrypted=index % 100 == 0)
            else:
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as raw:
                    raw.settimeout(10)
                    raw.connect(address.removeprefix("ipc://"))
                    raw.sendall(choose.choice((b"", _GREETING)) + frames.nonsense())
            self.sent["strangers"] += 1

    @staticmethod
    def _wrong_key(address: str, frames: Frames, *, encrypted: bool) -> None:
        keys = RunKey.new().line("control", "generator-0")
        with _peer(address, keys, encrypted=encrypted, linger=0) as peer:
            # libzmq drops the pipe once the handshake has failed, which may be before this line.
            with contextlib.suppress(zmq.Again):
                peer.send_multipart(frames.parts(), zmq.NOBLOCK)
            time.sleep(0.02)

    def _http(self, count: int) -> None:
        """Bytes that are no request, and requests for nothing."""
        frames, ports = Frames(self._seed + 2), list(self._run.ports().values())
        for index in range(count):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", ports[index % len(ports)]), 10) as raw,
            ):
                raw.sendall(_HTTP[index % 3] + frames.nonsense() + b"\r\n\r\n")
                raw.shutdown(socket.SHUT_WR)
                raw.recv(1 << 16)
            self.sent["http"] += 1


@contextlib.contextmanager
def _peer(
    address: str, keys: LineKeys, *, encrypted: bool = True, linger: int = 20_000
) -> Iterator[zmq.Socket[bytes]]:
    peer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    if encrypted:
        identify(peer, keys)
    else:
        peer.setsockopt(zmq.IDENTITY, keys.identity)
    peer.setsockopt(zmq.LINGER, linger)
    peer.setsockopt(zmq.SNDTIMEO, 30_000)
    peer.connect(address)
    try:
        yield peer
    finally:
        peer.close()
