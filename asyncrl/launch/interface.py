"""The interface of a launcher. `LocalLauncher` starts processes on this machine."""

from __future__ import annotations

from typing import Protocol

from asyncrl.processes.spec import ChildKeys, ChildSpec


class ProcessHandle(Protocol):
    """One started process."""

    spec: ChildSpec

    def exit_code(self) -> int | None:
        """None while the process runs; negative for a signal, as in `subprocess`."""

    def cause(self) -> str:
        """Why it ended, where its exit code does not say it: a lost node. Otherwise empty."""

    def end(self, *, by_force: bool) -> None:
        """Ask the process and its children to end, or kill them. Idempotent; does not wait."""

    def log_tail(self, lines: int = 12) -> str:
        """The last lines of its log, which say why it ended."""


class Launcher(Protocol):
    """Starts processes."""

    @property
    def threads(self) -> int:
        """Threads for tensor work that each process should use."""

    def start(self, spec: ChildSpec, keys: ChildKeys) -> ProcessHandle:
        """Start a process; returns at once."""
