"""A real run on a Ray cluster of several machines, followed from outside."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from asyncrl.launch.identity import ProcessIdentity, status_of, with_variable
from asyncrl.launch.records import MARK_VARIABLE, ProcessRecord
from asyncrl.monitoring.records.jsonl import read_jsonl
from benchmarks.chaos.agents_run import CHILD, words
from benchmarks.chaos.live_run import LiveRun
from benchmarks.harness import overrides
from benchmarks.machines.namespaces import Machine
from benchmarks.machines.ray import RayMachines

KEEPER = "asyncrl.launch.orphan_reaper"
DRIVER = "asyncrl.launch.ray.driver"
_FILES = "dev/shm"
"""Where a machine has files in memory."""


class Child(NamedTuple):
    """A process of the run on some machine."""

    machine: Machine
    pid: int
    """As this machine sees it."""
    role: str
    name: str

    @property
    def worker(self) -> int:
        """Process id of the Ray worker that has started its agent."""
        agent = status_of(self.pid)
        status = None if agent is None else status_of(agent.parent)
        return 0 if status is None else status.parent

    @property
    def agent(self) -> int:
        """Process id of its agent."""
        status = status_of(self.pid)
        return 0 if status is None else status.parent


@dataclass
class ClusterRun(LiveRun):
    """One run, whose controller is on the machine `controller_machine`."""

    cluster: RayMachines | None = None
    controller_machine: str = ""
    cut_off: list[Child] = field(default_factory=list)
    """What was on a machine when it was cut off, until that is over."""

    @property
    def nodes(self) -> RayMachines:
        assert self.cluster is not None
        return self.cluster

    @property
    def here(self) -> Machine:
        return self.nodes.machines[self.controller_machine]

    def _begin(
        self, settings: tuple[str, ...], more: tuple[str, ...], output: BinaryIO
    ) -> subprocess.Popen[bytes]:
        pairs = overrides(("launcher.kind=ray", self.nodes.setting, *settings))
        command = [sys.executable, "-m", "asyncrl", "run", str(self.setup.config), *more, *pairs]
        return self.here.start(command, output=output)

    def on(self, role: str = "") -> list[Child]:
        """The run's processes of this role (all if empty), by machine."""
        found = []
        for machine in self.nodes.machines.values():
            for pid in machine.having(CHILD, f'"run_id":"{self.name}-'):
                line = words(Path(f"/proc/{pid}/cmdline"))
                if line and (spec := json.loads(line[-1]))["role"].startswith(role):
                    found.append(Child(machine, pid, spec["role"], spec["name"]))
        return found

    def keepers(self) -> list[int]:
        """Process ids of the keepers of the run's processes."""
        return [
            pid
            for machine in self.nodes.machines.values()
            for pid in machine.having(KEEPER, f"{self.name}-")
        ]

    def driver(self) -> int | None:
        """Process id of the process that speaks to Ray; None while there is none."""
        found = self.here.having(DRIVER)
        return found[0] if found else None

    def note_sockets(self) -> None:
        """See LiveRun; the folder is a temporary one of the controller's machine."""
        before = set(self._sockets)
        super().note_sockets()
        for folder in self._sockets - before:
            self._sockets.discard(folder)
            self._sockets.add(self.here.root / str(folder).lstrip("/"))

    def children(self) -> list[ProcessRecord]:
        """None are recorded: their ids belong to other machines."""
        return []

    def descendants(self) -> list[ProcessIdentity]:
        """All living processes of any machine that the run has started."""
        try:
            records = read_jsonl(self.path / "processes.jsonl", ProcessRecord)
        except FileNotFoundError:
            return []
        return list(with_variable(MARK_VARIABLE, {record.mark for record in records}))

    def leftovers(self) -> dict[str, int]:
        """After the end: see LiveRun, over all machines; and Ray workers with an actor of a run."""
        machines = self.nodes.machines.values()
        files = [
            path
            for machine in machines
            for path in (machine.root / _FILES).glob(f"asyncrl-{self.name}-*")
        ]
        return {
            "processes": len(self.descendants()),
            "sockets": sum(folder.exists() for folder in self._sockets),
            # Machines may share memory.
            "shared_memory": len({(path.stat().st_dev, path.stat().st_ino) for path in files}),
            "actors": sum(len(machine.having("ray::AgentActor")) for machine in machines),
        }
