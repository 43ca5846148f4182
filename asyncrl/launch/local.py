"""Child processes on this machine, one log file each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from asyncrl.launch.interface import ProcessHandle
from asyncrl.processes.child import ChildSpec

_LOG_TAIL_BYTES = 16_384


class LocalProcess:
    """A child in a session of its own, so that it and what it starts can be ended together."""

    def __init__(self, spec: ChildSpec, process: subprocess.Popen[bytes], log: Path) -> None:
        self.spec = spec
        self._process = process
        self._log = log

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        code = self._process.poll()
        if code is not None:
            # What it started (an engine core, reward workers) must not outlive it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return code

    def end(self, *, by_force: bool) -> None:
        """Send SIGTERM, or SIGKILL, to the child and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if by_force:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.terminate()

    def last_words(self, lines: int = 12) -> str:
        """The end of its log file."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _LOG_TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(text.splitlines()[-lines:]) or "(its log is empty)"


class LocalLauncher:
    """Starts children with this interpreter; their cores are shared out evenly."""

    def __init__(self, logs: Path, *, processes: int, threads: int | None = None) -> None:
        self._logs = logs
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        self._threads = threads or max(1, available // processes)

    def threads_for(self, role: str) -> int:
        """The same for every role: generator and trainer cost about the same here."""
        del role
        return self._threads

    def start(self, spec: ChildSpec) -> ProcessHandle:
        """Start `python -m asyncrl.processes.child` with its output in logs/NAME.log."""
        log = self._logs / f"{spec.name}.log"
        environment = os.environ | {
            "OMP_NUM_THREADS": str(spec.threads),
            "MKL_NUM_THREADS": str(spec.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        with log.open("ab") as output:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "asyncrl.processes.child",
                    msgspec.json.encode(spec).decode(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        return LocalProcess(spec, process, log)
