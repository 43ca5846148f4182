"""Processes of one run are stopped for seconds, and its connections held: nothing may come of it.

Connections pass a proxy: as soon as a process has bound one of the run's sockets, the socket's file
is renamed, and the proxy listens in its place. A held connection takes no bytes and gives none.
"""

import contextlib
import random
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from asyncrl.config.run_config import load_config
from asyncrl.errors import AsyncrlError
from asyncrl.launch.identity import ProcessIdentity, identity_of, is_running, send
from asyncrl.monitoring.errors import RecordError
from asyncrl.monitoring.records.group_account import GroupAccount, read_account
from asyncrl.runs.directory import read_state
from asyncrl.steering.control_socket import ask
from asyncrl.tasks.model import resolve_model
from asyncrl.wire.errors import WireError
from asyncrl.wire.messages import control
from benchmarks.chaos.agents_run import AgentsRun
from benchmarks.chaos.campaign import with_command
from benchmarks.chaos.live_run import ChaosError, LiveRun, Setup
from benchmarks.harness import environment, table

LENGTHS = (3.0, 8.0, 15.0)
"""Seconds of a stall."""
STEPS_AFTER = 2
"""Finished steps between two stalls."""
RUNS: Mapping[str, tuple[type[LiveRun], str, tuple[str, ...]]] = {
    "arithmetic": (
        LiveRun,
        "arithmetic.yaml",
        ("trainer.ranks=2", "launcher.generators=2", "monitoring.web.enabled=true",
         "monitoring.web.port=0", "rewards.timeout_seconds=60"),
    ),
    "environments": (LiveRun, "guessing.yaml", ("environment.step_timeout_seconds=60",)),
    "agents": (AgentsRun, "arithmetic.yaml", ("rewards.timeout_seconds=60",)),
}  # fmt: skip
"""Where each run is, its example, and its own settings. Rewards and environments may take longer
than a stall."""
KINDS: Mapping[str, Sequence[str]] = {
    "arithmetic": (
        *("generator", "trainer", "trainer-1", "reward", "web", "controller"),
        *("connection:control", "connection:data", "connection:user"),
    ),
    "environments": ("environment", "generator"),
    "agents": ("agent", "relay"),
}
"""What is stalled in each run."""
_COMMANDS = {
    "reward": b"asyncrl.rewards.worker",
    "environment": b"asyncrl.environments.workers.worker",
    "web": b"asyncrl.web.process",
}
_USER = "user"
"""The socket of orders, to which nobody is connected for long."""
_CHUNK = 1 << 16


class Proxy:
    """Stands between those who connect to the sockets of a folder and the sockets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: set[tuple[str, int]] = set()
        self._held_users = False
        self._changed = threading.Condition()
        self.connections: dict[str, list[int]] = {}
        """Numbers of the open connections, by the socket's name."""
        self._number = 0
        self._done = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Stop looking for new sockets, and let go of what is held."""
        self._done.set()
        self.let_go()

    def hold(self, name: str, moments: random.Random) -> None:
        """Hold one of the connections of this socket; all that come of that of users."""
        with self._changed:
            if name == _USER:
                self._held_users = True
                return
            numbers = self.connections.get(name)
            if not numbers:
                raise ChaosError(f"no connection to the socket {name} passes the proxy")
            self._held.add((name, moments.choice(numbers)))

    def let_go(self) -> None:
        with self._changed:
            self._held.clear()
            self._held_users = False
            self._changed.notify_all()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            for path in self._folder.glob("asyncrl-*/*"):
                if path.suffix == ".held" or path.with_suffix(".held").exists():
                    continue
                with contextlib.suppress(OSError):
                    if path.is_socket():
                        self._stand_before(path)

    def _stand_before(self, path: Path) -> None:
        behind, made = path.with_suffix(".held"), path.with_suffix(".new")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(made))
        listener.listen(256)
        path.rename(behind)
        made.rename(path)
        threading.Thread(
            target=self._accept, args=(listener, path.name, behind), daemon=True
        ).start()

    def _accept(self, listener: socket.socket, name: str, behind: Path) -> None:
        while not self._done.is_set():
            near, _ = listener.accept()
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(str(behind))
            except OSError:  # its process has ended; another may bind it again
                near.close()
                continue
            with self._changed:
                self._number += 1
                number = self._number
                self.connections.setdefault(name, []).append(number)
            for one, other in ((near, far), (far, near)):
                threading.Thread(
                    target=self._pass_on, args=(one, other, name, number), daemon=True
                ).start()

    def _is_held(self, name: str, number: int) -> bool:
        return (name, number) in self._held or (name == _USER and self._held_users)

    def _pass_on(
        self, source: socket.socket, target: socket.socket, name: str, number: int
    ) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(_CHUNK):
                with self._changed:
                    self._changed.wait_for(lambda: not self._is_held(name, number))
                target.sendall(content)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        with self._changed, contextlib.suppress(ValueError):
            self.connections[name].remove(number)


@dataclass(frozen=True)
class Stall:
    kind: str
    seconds: float
    step: int
    """Steps trained before it."""
    seconds_to_next_step: float
    """From its end."""
    killed: tuple[str, ...] = ()
    """Processes that ended in consequence."""


@dataclass
class Stalled:
    wanted: int = 0
    stalls: list[Stall] = field(default_factory=list)
    accounts: list[GroupAccount] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def ratios(self) -> dict[str, float]:
        return {
            "stalls": len(self.stalls),
            "not_survived": self.wanted - len(self.stalls),
            "honest_killed": sum(len(one.killed) for one in self.stalls),
            "groups_lost": sum(len(one.lost) for one in self.accounts),
            "groups_twice": sum(len(one.twice) for one in self.accounts),
            "groups_failed": sum(len(one.failed) for one in self.accounts),
            "runs_failed": len(self.failures),
            "seconds_to_next_step_max": max(
                (one.seconds_to_next_step for one in self.stalls), default=0.0
            ),
        }

    @property
    def failed(self) -> bool:
        """Whether something that must hold does not."""
        ratios = self.ratios()
        zeros = ("not_survived", "honest_killed", "groups_lost", "groups_twice", "groups_failed")
        return any(ratios[name] for name in (*zeros, "runs_failed"))

    def raw(self) -> dict[str, Any]:
        return {"stalls": [asdict(one) for one in self.stalls], "failures": self.failures}

    def table(self) -> Table:
        """A line for each kind."""
        by_kind: dict[str, list[Stall]] = {}
        for one in self.stalls:
            by_kind.setdefault(one.kind, []).append(one)
        return table(
            "processes stopped and connections held for some seconds",
            "stalled,stalls,killed,next step s max",
            (
                (
                    kind,
                    len(stalls),
                    sum(len(one.killed) for one in stalls),
                    max(one.seconds_to_next_step for one in stalls),
                )
                for kind, stalls in by_kind.items()
            ),
        )


def measure_stalls(
    setup: Setup,
    kinds: Mapping[str, Sequence[str]],
    times: int,
    lengths: Sequence[float],
    seed: int,
) -> Stalled:
    """Carry out the runs, each with all its stalls in a random order."""
    found = Stalled()
    for name, of_run in kinds.items():
        moments = random.Random(seed)
        stalls = [(kind, length) for kind in of_run for length in lengths for _ in range(times)]
        moments.shuffle(stalls)
        found.wanted += len(stalls)
        place, example, settings = RUNS[name]
        own = Setup(setup.config.with_name(example), setup.folder, (*setup.settings, *settings))
        resolve_model(load_config(own.config, own.settings).model, None)  # made once, in minutes
        _stall_one_after_the_other(place(own, name, 1_000_000), stalls, moments, found)
    return found


def _stall_one_after_the_other(
    run: LiveRun, stalls: Sequence[tuple[str, float]], moments: random.Random, found: Stalled
) -> None:
    with _between(run.setup.folder / "s") as proxy:
        try:
            run.start()
            run.until(lambda: run.last_step_at() > 0, "its first step")
            for kind, seconds in stalls:
                time.sleep(moments.uniform(0, 1))
                stall = _stall(run, proxy, kind, seconds, moments)
                found.stalls.append(stall)
                print(f"{run.name}: {kind} for {seconds:g} s", *stall.killed, flush=True)
            if code := run.end():
                found.failures.append(f"{run.name} ended with exit code {code}")
        except ChaosError as error:
            found.failures.append(str(error))
        finally:
            proxy.let_go()
            run.abandon()
    try:
        found.accounts.append(read_account(run.path))
    except (OSError, RecordError) as error:
        found.failures.append(f"{run.name} has no records: {error}")


@contextlib.contextmanager
def _between(folder: Path) -> Iterator[Proxy]:
    """Runs make their folder of sockets in this one, and their connections pass the proxy."""
    folder.mkdir(mode=0o700, exist_ok=True)
    proxy = Proxy(folder)
    with environment(XDG_RUNTIME_DIR=str(folder)), contextlib.closing(proxy):
        yield proxy


def _stall(run: LiveRun, proxy: Proxy, kind: str, seconds: float, moments: random.Random) -> Stall:
    """One stall, and the steps after it."""
    _open_page(run) if kind == "web" else None
    before = _processes(run)
    step = run.last_step() + 1
    name = kind.removeprefix("connection:")
    if name == kind:
        with _stopped(_find(run, kind, moments)):
            time.sleep(seconds)
    else:
        proxy.hold(name, moments)
        if name == _USER:  # of users there is no connection unless one asks
            threading.Thread(target=_ask, args=(run,), daemon=True).start()
        time.sleep(seconds)
        proxy.let_go()
    ended = time.time()
    for _ in range(STEPS_AFTER):
        last = run.last_step_at()
        run.until(lambda last=last: run.last_step_at() > last, f"a step after {kind}")  # type: ignore[misc]
    later = [one.time for one in run.records() if one.time > ended]
    gone = tuple(sorted(before[one] for one in before if not is_running(one)))
    return Stall(kind, seconds, step, min(later, default=time.time()) - ended, gone)


def _ask(run: LiveRun) -> None:
    with contextlib.suppress(AsyncrlError, WireError):
        ask(run.path, control.StatusRequest())


@contextlib.contextmanager
def _stopped(processes: Sequence[ProcessIdentity]) -> Iterator[None]:
    for one in processes:
        send(one, signal.SIGSTOP)
    try:
        yield
    finally:
        for one in processes:
            send(one, signal.SIGCONT)


def _processes(run: LiveRun) -> dict[ProcessIdentity, str]:
    """All processes of the run, with the names of those that have one."""
    names = {record.process: record.name for record in run.children()}
    if isinstance(run, AgentsRun):
        names |= dict.fromkeys(run.agent_processes(), "agent")
    found = {one: names.get(one, "helper") for one in run.descendants()}
    if (controller := identity_of(run.controller)) is not None:
        found[controller] = "controller"
    return found


def _find(run: LiveRun, kind: str, moments: random.Random) -> list[ProcessIdentity]:
    """The processes of a kind that are stopped together. Raises ChaosError: there is none."""
    found: list[Any]
    if kind == "controller":
        found = [identity_of(run.controller)]
    elif isinstance(run, AgentsRun) and kind == "agent":
        found = [moments.choice(run.agent_processes())]
    elif kind in _COMMANDS:  # with their supervisors
        found = list(with_command(run.descendants(), _COMMANDS[kind]))
    else:
        exact = {"trainer": "trainer", "trainer-1": "trainer-1"}.get(kind)
        alive = [
            record.process
            for record in run.children()
            if is_running(record.process)
            and (record.name == exact if exact else record.name.startswith(kind))
        ]
        found = [moments.choice(alive)] if alive else []
    if not found or found[0] is None:
        raise run.error(f"has no process of the kind {kind}")
    return found


def _open_page(run: LiveRun) -> None:
    """The page's process starts with the first request."""
    state = read_state(run.path)
    if state is None or not state.web:
        raise run.error("has no web page")
    with contextlib.suppress(OSError), urllib.request.urlopen(state.web, timeout=60) as answer:  # noqa: S310
        answer.read(1)
