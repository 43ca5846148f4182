"""One run as a child process of the benchmark: its sockets, processes, memory and counters."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from asyncrl.monitoring.metrics.discovery import targets_file
from asyncrl.monitoring.records.metrics_log import read_metrics
from asyncrl.runs.directory import read_state
from asyncrl.steering.control_socket import ask
from asyncrl.user_code.process_tree import descendants
from asyncrl.wire import RunKey
from asyncrl.wire.messages import control
from benchmarks.hostile.victim import CONTROLLER, Order
from benchmarks.watched_run import own_bytes

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
