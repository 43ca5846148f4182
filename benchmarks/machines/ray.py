"""A real Ray cluster: the head on one machine, a node on each of them.

with ray_machines({"head": 0, "one": 1, "two": 1}, folder) as cluster:
    run = cluster.machines["one"].start(["asyncrl", "run", ..., "--set", cluster.setting])

Each node has 1,000 of a custom resource with its name, so that processes can be placed, and one of
`each`: processes that need it are on machines apart.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.machines.namespaces import Machine, machines, wait_until

_PORT = 6379
_OBJECT_BYTES = 80 << 20
"""Only small messages go through Ray's object store. The least that Ray takes is 75 MB."""
START_SECONDS = 300.0
_END_SECONDS = 30.0
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_BACKEND_LOG_LEVEL": "error",
    "RAY_NUM_REDIS_GET_RETRIES": "300",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # 15 otherwise, also for what a worker starts
    "PYTHONWARNINGS": "ignore",
}


@dataclass
class RayMachines:
    machines: dict[str, Machine]
    head: str
    """Name of the machine with the head."""
    cpus: Mapping[str, int]
    """Of each node."""
    folder: Path
    _starting: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{self.machines[self.head].address}:{_PORT}"

    @property
    def setting(self) -> str:
        return f"launcher.ray.address={self.address}"

    def start(self, name: str) -> None:
        """Start Ray on one machine; returns before it is ready."""
        machine = self.machines[name]
        if name in self._starting:
            self._starting[name].wait(_END_SECONDS)
        place = ["--head", f"--port={_PORT}", "--include-dashboard=false", "--no-monitor"]
        if name != self.head:
            place = [f"--address={self.address}"]
        with (self.folder / name / "start.log").open("wb") as log:
            self._starting[name] = machine.start(
                [
                    *(str(self._interpreter()), "-m", "ray.scripts.scripts"),
                    *(
                        "start",
                        "--block",
                        "--disable-usage-stats",
                        "--include-log-monitor=false",
                        *place,
                    ),
                    f"--node-ip-address={machine.address}",
                    f"--num-cpus={self.cpus[name]}",
                    f"--resources={json.dumps({name: 1000, 'each': 1})}",
                    f"--object-store-memory={_OBJECT_BYTES}",
                ],
                output=log,
            )

    def _interpreter(self) -> Path:
        """The interpreter under a path without spaces, since Ray's head starts it by a shell."""
        if " " not in sys.prefix:
            return Path(sys.executable)
        link = self.folder / "environment"
        if not link.is_symlink():
            link.symlink_to(sys.prefix)
        return link / "bin" / Path(sys.executable).name

    def start_all(self) -> None:
        """Start the head, then the nodes, each when the one before is ready.

        Ray gives a node 30 s. On a busy machine several at once need longer, again and again.
        """
        for name in (self.head, *(one for one in self.machines if one != self.head)):
            self.start(name)
            self.wait_for([name])

    def begin_anew(self) -> None:
        """Switch all machines off and on again, and start Ray on them."""
        for machine in self.machines.values():
            machine.power_off()
            machine.power_on()
        self.start_all()

    def wait_for(self, names: Sequence[str] | Mapping[str, Machine]) -> None:
        """Wait until each of these machines is a node of the cluster."""
        for name in names:
            wait_until(lambda name=name: self._is_ready(name), f"Ray on {name}", START_SECONDS)  # type: ignore[misc]

    def _is_ready(self, name: str) -> bool:
        if self._starting[name].poll() is not None:
            self.stop(name)
            self.start(name)  # on a busy machine: it gives up after 30 s
            return False
        log = self.folder / name / "start.log"
        runs = len(self.machines[name].having("raylet/raylet")) > 0
        return runs and log.exists() and b"Ray runtime started" in log.read_bytes()

    def head_process(self) -> int:
        return self.machines[self.head].having("gcs/gcs_server")[0]

    def raylet(self, name: str) -> int:
        """Process id of the raylet of a machine."""
        return self.machines[name].having("raylet/raylet")[0]

    def stop(self, name: str) -> None:
        """Kill what Ray has on a machine, by SIGKILL; other processes stay."""
        machine = self.machines[name]
        for _ in range(3):  # some start others
            for text in ("ray.scripts.scripts\0start", "/ray/", "ray::"):
                for pid in machine.having(text):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        """Take note of the end of what `start` has started, which was killed."""
        for process in self._starting.values():
            process.wait(_END_SECONDS)


@contextlib.contextmanager
def ray_machines(
    cpus: Mapping[str, int],
    folder: Path,
    *,
    shared_memory: bool = False,
    hidden: Mapping[str, Sequence[Path]] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[RayMachines]:
    """A cluster that is ready; the first machine has the head."""
    with machines(list(cpus), folder, shared_memory=shared_memory, hidden=hidden) as made:
        by_name = {machine.name: machine for machine in made}
        token = folder / "ray-token"
        token.write_text(secrets.token_hex(32), encoding="ascii")
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)} | dict(variables or {})
        for machine in made:
            machine.variables.update(_QUIET | own)
        cluster = RayMachines(by_name, next(iter(cpus)), cpus, folder)
        try:
            cluster.start_all()
            yield cluster
        finally:
            for machine in made:
                machine.power_off()
            cluster.reap()
