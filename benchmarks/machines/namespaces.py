"""Machines made of namespaces: each has its own network, processes, memory and temporary files.

with machines(["a", "b"], folder) as (a, b):
    a.start(["python", "-m", "http.server"])      # listens at a.address, reached from b
    b.cut()                                       # the switch drops its frames, both ways
    b.power_off()                                 # every process on it is gone at once

A machine is a network, mount, process and host-name namespace. Its first process sleeps; when it
is killed the kernel kills all others and removes network and memory. It is told to die with the
process that made it, so nothing is left after a failure either. The disk is shared, as a network
file system would be, except for what is named in `hidden`. There is no simulated delay: these
machines are as near as loopback.
"""

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_TOOLS = ("ip", "bridge", "unshare", "nsenter")
NETWORK = "192.0.2."
"""Addresses that RFC 5737 keeps for examples; they exist inside the namespaces only."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - each machine has its own
_KINDS = {"pid": 0x20000000, "net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}
_PR_SET_PDEATHSIG = 1
_SECONDS = 30.0
_libc = ctypes.CDLL(None, use_errno=True)


class NoMachinesError(Exception):
    """Machines cannot be made here; the text says why."""


def why_not() -> str | None:
    """What is missing to make machines here; None: nothing."""
    if os.geteuid() != 0:
        return "machines are namespaces, and making them needs root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"machines need {', '.join(missing)} (Debian: iproute2, util-linux)"
    tried = subprocess.run(["unshare", "-n", "-m", "-p", "-f", "-u", "true"], check=False)
    return "this kernel or container lets nobody make namespaces" if tried.returncode else None


@dataclass
class Machine:
    name: str
    """Also its host name."""
    address: str
    switch: int
    """Process id of the first process of the switch."""
    script: str
    """What its first process does before it sleeps."""
    variables: dict[str, str]
    """For the environment of its processes."""
    _holder: subprocess.Popen[bytes] | None = None
    first: int = 0
    """Process id of its first process, as this machine sees it."""

    @property
    def root(self) -> Path:
        """Its files, as seen from outside: `root / "dev/shm"`."""
        return Path(f"/proc/{self.first}/root")

    @property
    def port(self) -> str:
        """Where it is connected to the switch."""
        return f"to-{self.name}"

    @property
    def is_on(self) -> bool:
        return self._holder is not None

    def power_on(self) -> None:
        """Begin, without any process of an earlier time."""
        self._holder = subprocess.Popen(
            [
                *("unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--mount-proc"),
                *("--kill-child", "sh", "-c", self.script),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            raise NoMachinesError(f"machine {self.name} did not begin: {self.script}")
        children = f"/proc/{self._holder.pid}/task/{self._holder.pid}/children"
        self.first = int(Path(children).read_text(encoding="ascii").split()[0])
        if not self.switch:
            return
        _inside(self.switch, f"ip link add {self.port} type veth peer name eth0 netns {self.first}")
        _inside(self.switch, f"ip link set {self.port} master switch up")
        _inside(self.first, f"ip address add {self.address}/24 dev eth0")
        _inside(self.first, "ip link set eth0 up")

    def power_off(self) -> None:
        """Kill every process on it at once, as a power cut does."""
        if self._holder is None:
            return
        if self.switch:  # the kernel removes networks some time after their last process
            _inside(self.switch, f"ip link delete {self.port}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.first, signal.SIGKILL)
        self._holder.kill()
        self._holder.wait(_SECONDS)
        assert self._holder.stdout is not None
        self._holder.stdout.close()
        self._holder = None

    def cut(self) -> None:
        """Have the switch drop every frame from and to it. Nobody is told."""
        _inside(self.switch, f"bridge link set dev {self.port} state 0")

    def heal(self) -> None:
        _inside(self.switch, f"bridge link set dev {self.port} state 3")

    def start(
        self,
        command: Sequence[str],
        *,
        output: IO[bytes] | int = subprocess.DEVNULL,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on it. The process id is the one that this machine sees.

        Start it in the main thread: it is killed when the thread that has started it ends.
        """
        with contextlib.ExitStack() as files:
            namespaces = {
                kind: files.enter_context(Path(f"/proc/{self.first}/ns/{kind}").open("rb"))
                for kind in _KINDS
            }
            own = files.enter_context(Path("/proc/self/ns/pid").open("rb"))
            folder = Path.cwd()

            def enter() -> None:
                for kind in ("net", "uts", "mnt"):
                    enter_namespace(namespaces[kind].fileno(), kind)
                os.chdir(folder)  # entering other mounts leads to their root
                die_with_parent()

            enter_namespace(
                namespaces["pid"].fileno(), "pid"
            )  # holds for processes started from now on
            try:
                return subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self.environment(variables),
                    preexec_fn=enter,
                )
            finally:
                enter_namespace(own.fileno(), "pid")

    def environment(self, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        """Of its processes."""
        return _environment() | self.variables | dict(variables or {})

    def enter(self) -> None:
        """Have this process be on its network, under its name, with the files that it had."""
        for kind in ("net", "uts"):
            with Path(f"/proc/{self.first}/ns/{kind}").open("rb") as namespace:
                enter_namespace(namespace.fileno(), kind)

    def run(self, command: Sequence[str], seconds: float = _SECONDS) -> str:
        """Run a command on it to its end; its output. Raises CalledProcessError, TimeoutExpired."""
        process = self.start(command, output=subprocess.PIPE)
        with process:
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, list(command), output)
        return output.decode(errors="replace")

    def processes(self) -> list[int]:
        """Process ids of what runs on it, as this machine sees them."""
        if self._holder is None:
            return []
        mine = Path(f"/proc/{self.first}/ns/pid").readlink()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if (path / "ns/pid").readlink() == mine and int(path.name) != self.first:
                    found.append(int(path.name))
        return sorted(found)

    def having(self, *texts: str) -> list[int]:
        """Those of its processes whose command line has all of these texts."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                if all(text in line for text in texts):
                    found.append(pid)
        return found


@contextlib.contextmanager
def machines(
    names: Sequence[str],
    folder: Path,
    *,
    shared_memory: bool = False,
    hidden: Mapping[str, Sequence[Path]] | None = None,
) -> Iterator[list[Machine]]:
    """Machines at a switch of their own, which no other network is connected to."""
    reason = why_not()
    if reason is not None:
        raise NoMachinesError(reason)
    switch = Machine("switch", "", 0, _switch(), {})
    made = [switch]
    # Each machine has temporary files of its own on this folder, which hides nothing. Sockets of
    # Ray lie in it, so its name must be short.
    temporary = tempfile.mkdtemp(prefix="m-", dir="/tmp")
    try:
        switch.power_on()
        for number, name in enumerate(names, start=1):
            logs = folder / name / "ray"
            logs.mkdir(parents=True, exist_ok=True)
            lines = _temporary_files(temporary, logs)
            if not shared_memory:
                lines += _own_memory(temporary, [Path.cwd(), folder.resolve()])
            lines += [
                f"mount -t tmpfs tmpfs {_quoted(path)}" for path in (hidden or {}).get(name, ())
            ]
            script = "; ".join(["set -e", f"hostname {name}", "ip link set lo up", *lines, _SLEEP])
            variables = {"TMPDIR": temporary, "HOSTNAME": name}
            machine = Machine(name, f"{NETWORK}{number}", switch.first, script, variables)
            made.append(machine)
            machine.power_on()
        yield made[1:]
    finally:
        for machine in reversed(made):
            machine.power_off()
        os.rmdir(temporary)  # noqa: PTH106


def _switch() -> str:
    return "set -e; ip link add switch type bridge; ip link set switch up; " + _SLEEP


_SLEEP = "echo ready; exec env --ignore-signal=CHLD sleep infinity"
"""What ends on the machine is reaped by the kernel, since nobody asks for it."""


def _temporary_files(place: str, logs: Path) -> list[str]:
    return [
        f"mount -t tmpfs tmpfs {place}",
        f"mkdir {place}/ray",
        f"mount --bind {_quoted(logs)} {place}/ray",
    ]


def _own_memory(temporary: str, needed: Sequence[Path]) -> list[str]:
    """Cover /dev/shm; folders there that processes need, such as Python's, are shown again."""
    places = [*needed, Path(sys.prefix), Path(sys.base_prefix), Path(tempfile.gettempdir())]
    below = [one.resolve() for one in places if one.resolve().is_relative_to(_SHARED_MEMORY)]
    names = sorted({one.relative_to(_SHARED_MEMORY).parts[0] for one in below})
    kept = [(_quoted(Path(temporary, name)), _quoted(Path(_SHARED_MEMORY, name))) for name in names]
    return [
        *(f"mkdir {aside}; mount --bind {shown} {aside}" for aside, shown in kept),
        f"mount -t tmpfs tmpfs {_SHARED_MEMORY}",
        *(f"mkdir {shown}; mount --move {aside} {shown}; rmdir {aside}" for aside, shown in kept),
    ]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path.resolve()))


def _environment() -> dict[str, str]:
    left_out = ("XDG_RUNTIME_DIR", "TMPDIR", "RAY_ADDRESS")
    return {key: value for key, value in os.environ.items() if key not in left_out}


def _inside(first: int, command: str) -> None:
    """Run a command in the network of this machine or switch."""
    subprocess.run(
        ["nsenter", "-t", str(first), "-n", *command.split()], check=True, timeout=_SECONDS
    )


def enter_namespace(descriptor: int, kind: str) -> None:
    """Enter the pid, net, uts or mnt namespace of an open file of /proc/PID/ns."""
    if _libc.setns(descriptor, _KINDS[kind]):
        raise OSError(ctypes.get_errno(), f"setns {kind}")


def die_with_parent() -> None:
    """Be killed when the thread that has started this process ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def wait_until(condition: Any, what: str, seconds: float) -> None:
    """Wait for a condition. Raises TimeoutError, which names it."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.05)
