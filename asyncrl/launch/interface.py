"""What a launcher is. Local processes today; Ray actors join behind the same two protocols."""

from __future__ import annotations

from typing import Protocol

from asyncrl.processes.spec import ChildSpec


class ProcessHandle(Protocol):
    """One started process."""

    spec: ChildSpec

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal, as in `subprocess`."""

    def end(self, *, by_force: bool) -> None:
        """Ask it (and what it started) to end, or kill it. Idempotent; does not wait."""

    def last_words(self, lines: int = 12) -> str:
        """The end of its log, for the person who asks why it died."""


class Launcher(Protocol):
    """Starts processes."""

    def start(self, spec: ChildSpec) -> ProcessHandle:
        """Start a process; returns at once."""

    def threads_for(self, role: str) -> int:
        """Threads for tensor work that a process of this role should use."""
