"""The child of a node: started as a local one, watched, and never left behind.

    agent on a node
        ├── child (asyncrl.child), in a separate session, keys on its standard input
        └── keeper (asyncrl.launch.orphan_reaper), a child of neither

The kernel signals a child when the *thread* that started it ends, so that thread waits for it. A
keeper ends what a killed agent or child leaves behind; a keeper that is killed is replaced.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.launch.child_spec import CONFIG_VARIABLE
from asyncrl.launch.identity import pidfd_of
from asyncrl.launch.orphan_reaper import MARK_VARIABLE
from asyncrl.launch.records import MARK_VARIABLE as RUN_MARK
from asyncrl.launch.start_order import last_lines, open_log

CHILD_MODULE = "asyncrl.child"
KEEPER_MODULE = "asyncrl.launch.orphan_reaper"

GRACE_SECONDS = 12.0
"""Time for the child of a lost process to end on its own. It cleans up for at most 10 s after
SIGTERM (`asyncrl.child`)."""
_START_SECONDS = 30.0
_KEEPER_SECONDS = 1.0
"""Delay of the restart of a keeper, unless the child ends first."""
_TAIL_LINES = 40
_FOLDERS = ("logs", "timeline", "engine", "slots", "samples", "cache", "unfinished", "checkpoints")


def code_version() -> str:
    """Return asyncrl's version and a digest of its sources; empty if it cannot be imported."""
    digest = hashlib.blake2b(digest_size=4)
    spec = importlib.util.find_spec("asyncrl")
    if spec is None or not spec.submodule_search_locations:
        return ""
    root = Path(spec.submodule_search_locations[0])
    for path in sorted(
        Path(folder, file)
        for folder, _, files in os.walk(root, followlinks=True)  # asyncrl/engine is a link
        for file in files
        if file.endswith(".py")
    ):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    try:
        version = importlib.metadata.version("asyncrl")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    return f"{version} ({digest.hexdigest()})"


def node_facts(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that `asyncrl.launch.nodes.NodeInfo` has of this node."""
    try:
        shares = Path(asked["token_file"]).read_text(encoding="utf-8") == asked["token"]
    except OSError:
        shares = False
    model, disk = Path(asked["model"]), Path(tempfile.gettempdir()).stat()
    return {
        "hostname": socket.gethostname(),
        "memory": memory_of(Path(asked["weights_directory"])),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "asyncrl": code_version(),
        "shares_run_directory": shares,
        "has_model": not model.is_absolute() or model.is_dir(),
        "disk": f"{disk.st_dev} {disk.st_ino}",  # the same in every mount namespace
    }


@dataclass(frozen=True)
class Place:
    """The place at which a child is started."""

    node: str
    ip: str
    """Address at which its children listen."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Changes of the child's spec; a field that the role lacks is ignored."""
    run_directory: str = ""
    """The run's folder if its path differs from the controller's, otherwise empty."""


class NodeChild:
    """One child. Its methods may be called by several threads."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._started = threading.Event()
        self._failure = ""
        self._log = Path(os.devnull)

    def start(self, order: str, keys: bytes, place: Place) -> str:
        """Start the child; return the path of its log.

        `order` is JSON with name, spec (an object), shares_run_directory, run_id, relay_per_node,
        environment, cwd (`asyncrl.launch.start_order`). `keys` are for its standard input. Raises
        OSError or TimeoutError if it was not started.
        """
        asked = json.loads(order)
        spec: dict[str, Any] = asked["spec"]
        run = Path(spec["run_directory"])
        if not asked["shares_run_directory"]:
            run = Path(tempfile.gettempdir()) / f"asyncrl-{asked['run_id']}"
        elif place.run_directory:
            run = Path(place.run_directory)
        for folder in ("", *_FOLDERS) if not asked["shares_run_directory"] else ():
            (run / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        changes: dict[str, Any] = {
            "home_directory": spec["run_directory"],
            "run_directory": str(run),
            "parent": os.getpid(),
            "shares_run_directory": asked["shares_run_directory"],
            "data_address": "" if spec["role"] == "generator" else f"tcp://{place.ip}:*",
        }
        if spec["role"] == "relay" or spec["relayed"]:
            memory = memory_of(Path(spec["weights_directory"]))
            meeting = place.node if asked["relay_per_node"] else memory
            changes["relay_address"] = _relay_address(asked["run_id"], meeting)
        changes |= place.changes
        spec |= {key: value for key, value in changes.items() if key in spec}  # as its role has
        self._log = run / "logs" / f"{asked['name']}.log"
        mark = secrets.token_hex(16)
        environment = os.environ | asked["environment"] | {MARK_VARIABLE: mark}
        environment[CONFIG_VARIABLE] = spec.pop("config_json")  # no command line for secrets
        cwd = asked["cwd"] if Path(asked["cwd"]).is_dir() else None
        arguments = spec, keys, environment, cwd, mark
        threading.Thread(target=self._run, args=arguments, daemon=True).start()
        if not self._started.wait(_START_SECONDS):
            raise TimeoutError(f"{asked['name']} was not started within {_START_SECONDS:.0f} s")
        if self._failure:
            raise OSError(self._failure)
        return str(self._log)

    def _run(
        self, spec: dict[str, Any], keys: bytes, environment: dict[str, str], cwd: str | None,
        mark: str,
    ) -> None:  # fmt: skip
        """Start the child and wait for its end: the kernel must find this thread alive."""
        python = [sys.executable, "-P", "-m"]
        try:
            with open_log(self._log) as output:
                self._child = subprocess.Popen(
                    [*python, CHILD_MODULE, json.dumps(spec, separators=(",", ":"))],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=cwd,
                    start_new_session=True,
                )
            command = [
                *python, KEEPER_MODULE, str(os.getpid()), str(self._child.pid), mark,
                environment[RUN_MARK], spec["weights_directory"], spec["run_id"], spec["name"],
                str(GRACE_SECONDS),
            ]  # fmt: skip
            keeper = _started_keeper(command)
            threading.Thread(target=self._keep_one, args=(command, keeper), daemon=True).start()
            assert self._child.stdin is not None  # noqa: S101
            with contextlib.suppress(BrokenPipeError), self._child.stdin:
                self._child.stdin.write(keys)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self._failure = str(error)
            if self._child is not None:
                self._child.kill()
        finally:
            self._started.set()
        if self._child is not None:
            self._child.wait()
            self._ended.set()

    def _keep_one(self, command: list[str], keeper: int) -> None:
        while True:
            if (end := pidfd_of(keeper)) is not None:
                select.select([end], [], [])
                os.close(end)
            if self._ended.wait(_KEEPER_SECONDS):
                return
            with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
                keeper = _started_keeper(command)

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if it is not started."""
        return None if self._child is None else self._child.pid

    def watch(self, seconds: float) -> tuple[int | None, str]:
        """Wait for the child's end, for at most `seconds`; return exit code and end of log."""
        self._ended.wait(seconds)
        child = self._child
        return None if child is None else child.poll(), last_lines(self._log, _TAIL_LINES)

    def end(self, by_force: bool) -> None:
        """Send SIGTERM to the child, or SIGKILL to it and its children."""
        child = self._child
        if child is None or self._ended.is_set():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if by_force:
                os.killpg(child.pid, signal.SIGKILL)
            else:
                child.terminate()


def _started_keeper(command: list[str]) -> int:
    """Start a keeper, which forks so that it is not the agent's child; return its process id."""
    done = subprocess.run(
        command,
        check=True,
        timeout=_START_SECONDS,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return int(done.stdout)


def _relay_address(run_id: str, place: str) -> str:
    """Return the address at which the processes of the node `place` meet their relay."""
    name = hashlib.blake2b(f"{run_id} {place}".encode(), digest_size=10).hexdigest()
    return f"ipc://{Path(tempfile.gettempdir()) / f'asyncrl-{name}' / 'control'}"


def memory_of(folder: Path) -> str:
    """Identify a folder in memory: the boot of the machine and the file system in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {folder.stat().st_dev}"
    except OSError as error:
        return f"{socket.gethostname()}: {error.strerror}"
