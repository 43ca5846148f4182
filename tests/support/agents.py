"""Agents in processes of this machine, as `asyncrl agent` starts them."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.agents_run import free_ports

ROOT = Path(__file__).parents[2]


@dataclass
class Agents:
    """Starts agents, and kills those that a failed test leaves behind."""

    folder: Path
    port: int = field(default_factory=lambda: free_ports(2))
    started: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @property
    def key_file(self) -> Path:
        return self.folder / "agents.key"

    @property
    def settings(self) -> list[str]:
        """Of the run."""
        values = {
            "kind": "agents",
            "agents.listen": f"127.0.0.1:{self.port}",
            "agents.key_file": self.key_file,
        }
        return [
            part for key, value in values.items() for part in ("--set", f"launcher.{key}={value}")
        ]

    def start(self, name: str, role: str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "asyncrl", "agent", "--role", role, "--name", name]
        command += ["--controller", f"127.0.0.1:{self.port}", "--key-file", str(self.key_file)]
        with (self.folder / f"{name}.log").open("a") as log:
            self.started[name] = subprocess.Popen(
                [*command, *more], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True
            )
        return self.started[name]

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def end(self) -> None:
        for process in self.started.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait(timeout=30)
