"""Run a command and measure its memory, its processor time, and what else the machine did."""

import os
import resource
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 2.0
"""Between two looks at the memory. One look takes some 20 ms of one core."""
DISTURBED_SHARE = 0.03
"""Others' share of the machine's processor time from which a run counts as disturbed."""
_TICKS = os.sysconf("SC_CLK_TCK")


class RunError(Exception):
    """A contestant failed. The message quotes the end of its output."""


@dataclass(frozen=True)
class Usage:
    """What one command used, with all processes that it started."""

    wall_seconds: float
    cpu_seconds: float
    """User and system time."""
    peak_bytes: int
    """Largest sum of the proportional set sizes of all processes at one moment."""
    load_before: float
    """Load average over one minute."""
    load_after: float
    others_share: float
    """Share of the machine's processor time that other processes took meanwhile."""

    @property
    def disturbed(self) -> bool:
        """Whether other processes took so much that the timing is worth little."""
        return self.others_share > DISTURBED_SHARE


def run_measured(
    command: Sequence[str], environment: Mapping[str, str], timeout_seconds: float
) -> Usage:
    """Run a command to its end. Nothing else may be started and awaited meanwhile."""
    load, busy, own, children = os.getloadavg()[0], _machine_seconds(), _own(), _children()
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watch = _MemoryWatch(process.pid)
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired as error:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise RunError(f"it took more than {timeout_seconds:.0f} s") from error
    finally:
        watch.stop()
    wall = time.perf_counter() - began
    if process.returncode:
        end = "\n".join(output.splitlines()[-25:])
        raise RunError(f"it failed with exit code {process.returncode}:\n{end}")
    used = _children() - children
    others = _machine_seconds() - busy - used - (_own() - own)
    cores = len(os.sched_getaffinity(0))
    return Usage(
        wall_seconds=wall,
        cpu_seconds=used,
        peak_bytes=watch.peak,
        load_before=load,
        load_after=os.getloadavg()[0],
        others_share=max(0.0, others) / (wall * cores),
    )


class _MemoryWatch:
    """A thread that looks at the memory of a process and all its descendants."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, memory_of(self._pid))


def memory_of(pid: int) -> int:
    """Proportional set size of a process and its descendants, in bytes; shared pages count once."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _text(entry / "stat").rpartition(")")[2].split()
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        waiting += children.get(one, [])
        for line in _text(Path(f"/proc/{one}/smaps_rollup")).splitlines():
            if line.startswith("Pss:"):
                found += int(line.split()[1]) * 1024
    return found


def _text(path: Path) -> str:
    """A file of /proc; empty if the process has ended."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _machine_seconds() -> float:
    """Processor time that the machine has spent on anything: not idle, not waiting for a disk."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(field)
        for field in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _own() -> float:
    return _seconds(resource.RUSAGE_SELF)


def _children() -> float:
    return _seconds(resource.RUSAGE_CHILDREN)


def _seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime
