"""Runs the parts of a check one after the other, each in a process group with a time limit."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from asyncrl.gpu_check.parts import Context, Part, Verdict

Clock = Callable[[], float]

ROOT = Path(__file__).resolve().parents[2]
_DISCOVERY = Part("discovery", "count the GPUs", "asyncrl.gpu_check.machine:count_gpus", 120)
_LAST_LINES = 20
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 5.0
"""Time between SIGTERM, after which a run removes its shared memory, and SIGKILL."""
_AGAIN_SECONDS = 2.0
"""Interval of the signals to a part's program. Both waits fit into `_GRACE_SECONDS`."""
_REAP_SECONDS = 10.0
"""Wait after SIGKILL. A process that a driver holds cannot be ended, and is left behind."""
LIMIT_FACTOR = "ASYNCRL_GPU_CHECK_LIMIT_FACTOR"
"""Environment variable that multiplies the limit of each part, for machines that are busy."""
_LEAST_SECONDS = 5.0


def count_gpus(folder: Path) -> Verdict:
    """Ask torch, in a separate process, how many GPUs it sees: "gpus" of its numbers."""
    return run_part(_with_factor(_DISCOVERY), Context(folder, 0, small=True))


def run_parts(
    parts: Sequence[Part],
    context: Context,
    *,
    limit_seconds: float,
    say: Callable[[Verdict], None],
    missing: Sequence[str] | None = None,
    clock: Clock = time.monotonic,
) -> list[Verdict]:
    """Run the parts that this machine can run, in order; `say` is called with each verdict.

    A part that the common `limit_seconds` cuts short is left out, not failed. `missing` are modules
    that count as not installed (None: those that are not found).
    """
    deadline = clock() + limit_seconds
    absent = _missing(parts) if missing is None else missing
    verdicts = []
    for part in map(_with_factor, parts):
        left = deadline - clock()
        if reason := part.lacks(context.gpus, absent):
            verdict = Verdict(part.name, "left out", reason)
        elif left < _LEAST_SECONDS:
            verdict = Verdict(part.name, "left out", "no time is left (--limit-minutes)")
        elif left < part.seconds:
            verdict = run_part(replace(part, seconds=left), context, "left out", clock)
        else:
            verdict = run_part(part, context, clock=clock)
        verdicts.append(verdict)
        say(verdict)
    return verdicts


def run_part(
    part: Part,
    context: Context,
    late: Literal["failed", "left out"] = "failed",
    clock: Clock = time.monotonic,
) -> Verdict:
    """Run one part to its end or its limit; `late` is the verdict at the limit."""
    log, result = (context.folder / f"{part.name}.{end}" for end in ("log", "json"))
    task = {
        "function": part.function, "result": str(result), "folder": str(context.folder),
        "gpus": context.gpus, "small": context.small,
    }  # fmt: skip
    began = clock()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl.gpu_check.child", json.dumps(task)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(),
        )
        try:
            in_time = _ended(process, part.seconds, clock)
        finally:
            is_gone = _end_group(process)
    seconds = clock() - began
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    if not in_time:
        sentence = f"no time was left after {seconds:.0f} s of it (--limit-minutes)"
        if late == "failed":
            last = f"; it last printed: {lines[-1].strip()}" if lines else ""
            sentence = f"did not end within its limit of {part.seconds:.0f} s{last}"
        if not is_gone:
            sentence += "; even SIGKILL did not end its process, which is left behind"
        return Verdict(part.name, late, sentence, seconds, {}, lines)
    try:
        said: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        code = process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        sentence = f"its process ended with {how}"
        return Verdict(part.name, "failed", sentence, seconds, {}, lines)
    failed = said["verdict"] == "failed"
    return Verdict(part.name, seconds=seconds, last_lines=lines if failed else [], **said)


def run_command(command: Sequence[str]) -> int:
    """Run a program of a part; return its exit code.

    If this process receives SIGTERM, the program gets SIGTERM twice before it is killed: a second
    and a third one (with the group's) end `asyncrl run` at once, and its shared memory is removed.
    """
    process = subprocess.Popen(command)
    try:
        return process.wait()
    finally:
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.terminate()  # does nothing if it has ended
                process.wait(_AGAIN_SECONDS)
        process.kill()


def _with_factor(part: Part) -> Part:
    return replace(part, seconds=part.seconds * float(os.environ.get(LIMIT_FACTOR, "1")))


def _ended(process: subprocess.Popen[bytes], seconds: float, clock: Clock = time.monotonic) -> bool:
    """Return True if the process ends in time; it is not reaped, so that its id stays taken."""
    deadline = clock() + seconds
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while os.waitid(os.P_PID, process.pid, options) is None:
        if clock() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _end_group(process: subprocess.Popen[bytes]) -> bool:
    """End a process in order if possible, and its group; reap it. Return True if it is gone."""
    for number, grace in ((signal.SIGTERM, _GRACE_SECONDS), (signal.SIGKILL, 0.0)):
        if number == signal.SIGKILL or not _ended(process, 0.0):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            _ended(process, grace)
    try:
        process.wait(_REAP_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _missing(parts: Sequence[Part]) -> list[str]:
    names = {name for part in parts for name in part.packages}
    return [name for name in sorted(names) if importlib.util.find_spec(name) is None]
