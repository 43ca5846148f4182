"""A real run on agents of this machine, with a relay on each, followed from outside."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from asyncrl.launch.identity import ProcessIdentity, identity_of
from asyncrl.launch.records import MARK_VARIABLE, ProcessRecord
from benchmarks.chaos.live_run import LiveRun

CHILD = "asyncrl.child"
PLACES = {"t": "trainer", "g": "generator", "h": "generator"}
"""Agents, and what they run."""


@dataclass
class AgentsRun(LiveRun):
    """One run, whose processes are children of agents."""

    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def _begin(
        self, settings: tuple[str, ...], more: tuple[str, ...], output: BinaryIO
    ) -> subprocess.Popen[bytes]:
        key, address = self.setup.folder / "agents.key", f"127.0.0.1:{free_ports(1)}"
        command = [sys.executable, "-m", "asyncrl"]
        subprocess.run([*command, "agent-key", str(key)], check=True, stdout=output)
        for name, role in PLACES.items():
            asked = [*("--role", role), *("--name", name), *("--key-file", str(key))]
            self.agents[name] = subprocess.Popen(
                [*command, "agent", "--once", "--controller", address, *asked],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        launcher = {
            "kind": "agents",
            "generators": 2,
            "agents.relays": "always",
            "agents.listen": address,
            "agents.key_file": key,
        }
        own = tuple(f"launcher.{name}={value}" for name, value in launcher.items())
        return super()._begin((*settings, *own), more, output)

    def children(self) -> list[ProcessRecord]:
        """What the agents have started for the run, in the order of their process ids."""
        found = []
        for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda one: int(one.name)):
            process = identity_of(int(path.name))
            line = words(path / "cmdline")
            if process is None or CHILD not in line:
                continue
            spec = json.loads(line[-1])
            if spec["run_id"].startswith(f"{self.name}-"):
                found.append(ProcessRecord(spec["name"], process, _mark(path)))
        return found

    def agent_processes(self) -> list[ProcessIdentity]:
        found = (identity_of(agent.pid) for agent in self.agents.values())
        return [one for one in found if one is not None]

    def descendants(self) -> list[ProcessIdentity]:
        """See LiveRun; the agents are among them."""
        return [*super().descendants(), *self.agent_processes()]

    def end(self, *, in_order: bool = True) -> int:
        """End the run, and its agents with it; see LiveRun."""
        code = super().end(in_order=in_order)
        for name, agent in self.agents.items():
            try:
                agent.wait(timeout=self.setup.timeout_seconds)
            except subprocess.TimeoutExpired as error:
                raise self.error(f"left its agent {name}") from error
        return code

    def abandon(self) -> None:
        """Kill what still runs, after a failure."""
        super().abandon()
        for agent in self.agents.values():
            agent.kill()


def words(file: Path) -> list[str]:
    """The words of a command line or of an environment in /proc; none of a process that ended."""
    try:
        text = file.read_bytes().decode(errors="replace")
    except OSError:
        return []
    return text.rstrip("\0").split("\0")


def _mark(process: Path) -> str:
    for word in words(process / "environ"):
        if word.startswith(f"{MARK_VARIABLE}="):
            return word.partition("=")[2]
    return ""


def free_ports(count: int) -> int:
    """The first of so many free ports side by side."""
    for first in range(20_000 + os.getpid() % 5_000, 32_000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise OSError(f"no {count} free ports side by side")
