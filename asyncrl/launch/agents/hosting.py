"""Starts, watches and ends the children of an agent, and assigns their ports if they are fixed."""

import asyncio
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncrl.config.launcher import MAX_PORT
from asyncrl.errors import UserError
from asyncrl.launch.node_child import GRACE_SECONDS, NodeChild, Place
from asyncrl.wire.messages import from_agent, to_agent

NEEDED = {"trainer": 1, "relay": 3, "generator": 0}
"""Number of ports that a process listens at, by role."""


class Ports:
    """Hands out ports of the range `text`, if it is not empty. Raises UserError."""

    def __init__(self, text: str) -> None:
        self._free: list[int] | None = None
        self._given: dict[str, list[int]] = {}
        if not text:
            return
        found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
        first, last = (int(found[1]), int(found[2])) if found else (0, 0)
        least = sum(NEEDED.values())
        if not 1 <= first <= last <= MAX_PORT or last - first + 1 < least:
            raise UserError(
                f"--ports {text}: must be FIRST-LAST with at least {least} ports from 1 to "
                f"{MAX_PORT}, for example 5910-5919"
            )
        self._free = list(range(first, last + 1))

    def give(self, process: str, role: str) -> tuple[int, ...]:
        """Return ports for a process; empty: the system chooses. Raises UserError."""
        if self._free is None:
            return ()
        count = NEEDED[role]
        if count > len(self._free):
            raise UserError(f"{process} needs {count} ports; --ports has {len(self._free)} left")
        self._given[process] = self._free[:count]
        del self._free[:count]
        return tuple(self._given[process])

    def take_back(self, process: str) -> None:
        """Take back the ports of a process that has ended."""
        if self._free is not None:
            self._free = sorted(self._free + self._given.pop(process, []))


_WATCH_SECONDS = 1.0
KILL_SECONDS = 10.0


@dataclass
class _Hosted:
    name: str
    role: str
    child: NodeChild = field(default_factory=NodeChild)
    code: int | None = None
    cause: str = ""
    log: str = ""
    tail: str = ""
    is_started: bool = False
    ending: bool = False
    by_force: bool = False
    told: tuple[bool, bool] = (False, False)
    """Orders sent to the child: to end, by force."""
    ready: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class Hosting:
    """Runs the processes on an agent's machine."""

    _place: Callable[[dict[str, object]], Place]
    _ports: Ports
    _changed: Callable[[], None]
    _hosted: dict[str, _Hosted] = field(default_factory=dict, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    @property
    def work(self) -> list[str]:
        """The names of the running trainer or generator."""
        return [
            name
            for name, one in list(self._hosted.items())
            if one.role != "relay" and not one.ended.is_set()
        ]

    @property
    def is_ready(self) -> bool:
        """True if a trainer or generator here can take work. Any thread may ask."""
        return any(
            one.ready and one.role != "relay" and not one.ended.is_set()
            for one in list(self._hosted.values())
        )

    @property
    def processes(self) -> tuple[from_agent.Hosted, ...]:
        """The processes, for the controller."""
        return tuple(
            from_agent.Hosted(one.name, one.code, one.cause, one.log, one.tail)
            for one in self._hosted.values()
        )

    def obey(self, orders: to_agent.Orders) -> None:
        """Start, end and forget as these orders newly demand."""
        for wanted in orders.processes:
            one = self._hosted.get(wanted.name)
            if one is None and wanted.start is not None:
                one = self._start(wanted.name, wanted.start)
            if one is not None:
                one.ready = wanted.ready
                self._end(one, ending=wanted.ending, by_force=wanted.by_force)
        named = {wanted.name for wanted in orders.processes}
        for name, one in list(self._hosted.items()):
            if one.ended.is_set() and name not in named:
                del self._hosted[name]

    def _start(self, name: str, start: to_agent.Start) -> _Hosted:
        spec = json.loads(start.order)["spec"]
        one = self._hosted[name] = _Hosted(name, spec["role"])
        task = asyncio.create_task(self._host(one, spec, start))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return one

    async def _host(self, one: _Hosted, spec: dict[str, object], start: to_agent.Start) -> None:
        try:
            place = self._place(spec)
            place.changes["ports"] = self._ports.give(one.name, one.role)
            one.log = await asyncio.to_thread(one.child.start, start.order, start.keys, place)
        except (OSError, UserError) as error:
            one.code, one.cause = 1, f"was not started: {error}"
        else:
            one.is_started = True
            self._end(one, ending=one.ending, by_force=one.by_force)
            while one.code is None:
                one.code, one.tail = await asyncio.to_thread(one.child.watch, _WATCH_SECONDS)
        self._ports.take_back(one.name)
        one.ended.set()
        self._changed()

    def _end(self, one: _Hosted, *, ending: bool, by_force: bool) -> None:
        one.ending, one.by_force = one.ending or ending, one.by_force or by_force
        wanted = one.ending, one.by_force
        if one.is_started and wanted != one.told and one.ending:
            one.told = wanted
            one.child.end(one.by_force)

    async def end_all(self, *, by_force: bool = False) -> None:
        """End all children; kill those that take longer than GRACE_SECONDS, or all at once."""
        for force in (False, True)[by_force:]:
            living = [one for one in self._hosted.values() if not one.ended.is_set()]
            for one in living:
                self._end(one, ending=True, by_force=force)
            waits = [asyncio.create_task(one.ended.wait()) for one in living]
            if waits:
                await asyncio.wait(waits, timeout=KILL_SECONDS if force else GRACE_SECONDS)
            for wait in waits:
                wait.cancel()

    def forget(self) -> None:
        """Forget all processes before another controller, which does not know them."""
        self._hosted.clear()

    def reap(self) -> None:
        """Reap orphans, as the first process of a container."""
        if os.getpid() != 1 or any(not one.is_started for one in self._hosted.values()):
            return
        ours = {one.child.pid for one in self._hosted.values()}
        try:
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in ours:
                    return  # a thread of ours waits for it
                os.waitpid(ended.si_pid, os.WNOHANG)
        except ChildProcessError:
            return
