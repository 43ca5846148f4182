"""The controller's side of `launcher.kind: ray`: a launcher of agents that Ray starts.

messages   consumes: messages of the Ray driver. produces: losses for the registry.
           waits for: the driver. unblocked by: its end

The driver, and all processes that Ray has started for it, end when its pipe is closed. The kernel
closes the pipe if the controller is killed.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.launch.agents.agent_state import Agent
from asyncrl.launch.agents.launcher import AgentsLauncher
from asyncrl.launch.agents.registry import Needs
from asyncrl.launch.agents.wait_for_agents import gather
from asyncrl.launch.child_spec import Role
from asyncrl.launch.ray import messages
from asyncrl.launch.ray.messages import Slot
from asyncrl.launch.records import ProcessRecords
from asyncrl.launch.start_order import last_line
from asyncrl.wire import RunKey

DRIVER_MODULE = "asyncrl.launch.ray.driver"
CLOSE_SECONDS = 30.0
"""Longest wait for the driver's end; its own limit is lower."""
FIRST_SECONDS = 30.0
"""Longest time for the driver's imports."""
ROOM_SECONDS = 6.0
"""Longest wait for room for a joining generator: the user waits 10 s for the answer."""
ANSWER_SECONDS = 2.0
"""Additional wait for the driver's answer."""
NODE_SECONDS = 3.0
"""Time in which the head finds out that a node is gone."""
SILENT_SECONDS = 20.0
"""Time after which a silent agent is lost, once the head is gone."""
_LONGEST_LINE = 1 << 24
"""Bytes; a refusal names the bundles of all processes."""
_UNAUTHENTICATED = "InvalidAuthToken"
"""Part of the log of a driver that a head refuses; Ray retries without an end."""


def check_ray() -> None:
    """Raise UserError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "launcher.kind: ray needs Ray, which is not installed: make setup EXTRAS=ray, or pip "
            "install 'asyncrl[ray]', on every node; or use launcher.kind: local"
        )


@dataclass(slots=True)
class DriverProcess:
    """The Ray driver (`asyncrl.launch.ray.driver`), as the controller handles it."""

    process: asyncio.subprocess.Process
    log: Path

    @classmethod
    async def start(cls, log: Path) -> Self:
        """Start a driver that appends its errors to `log`."""
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", DRIVER_MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the controller
                limit=_LONGEST_LINE,
            )
        return cls(process, log)

    def tell(self, message: messages.ToDriver) -> None:
        """Send a message, or queue it if the driver does not read."""
        assert self.process.stdin is not None  # noqa: S101
        self.process.stdin.write(messages.line(message))

    async def hear(self) -> messages.FromDriver | None:
        """Return its next message; None if it has ended."""
        assert self.process.stdout is not None  # noqa: S101
        text = await self.process.stdout.readline()
        return messages.FROM_DRIVER.decode(text) if text.endswith(b"\n") else None

    async def opened(self) -> messages.Opened:
        """Wait until room is reserved, stage by stage. Raises UserError."""
        what, seconds = "Ray to be imported", FIRST_SECONDS
        while True:
            try:
                message = await asyncio.wait_for(self.hear(), seconds)
            except TimeoutError:
                raise UserError(self._silent(what)) from None
            match message:
                case messages.Stage(what=what, seconds=seconds):
                    pass
                case messages.Opened():
                    return message
                case messages.Refused(reason=reason):
                    raise UserError(reason)
                case None:
                    raise UserError(
                        f"waited for {what}, but the Ray driver ended; the last line of its log, "
                        f"{self.log}: {self.last_line()}"
                    )

    def _silent(self, what: str) -> str:
        if _UNAUTHENTICATED in self.last_line():
            return (
                "the Ray head requires a token, and this process has a wrong one or none: set "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (or RAY_AUTH_TOKEN) for `asyncrl "
                "run`, as for `ray start` on every node"
            )
        return (
            f"waited for {what}, and it did not come in time. A head that is dead or behind a "
            "firewall does not refuse a connection, it is silent: check it with `ray status "
            "--address=HOST:PORT` from this machine"
        )

    def last_line(self) -> str:
        """Return the last line of its log."""
        return last_line(self.log) or "(its log is empty)"

    def kill(self) -> None:
        """Kill it; Ray ends the processes that a driver leaves behind."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def close(self) -> None:
        """Close its pipe, so that it ends; kill it if it is late, or if this is cancelled."""
        assert self.process.stdin is not None  # noqa: S101
        self.process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()
        except asyncio.CancelledError:
            self.kill()
            raise


class RayLauncher(AgentsLauncher):
    """Starts processes on the agents that Ray has started, each in its own bundle.

    `opened` is the driver's answer, `slots` the reserved room: trainer ranks, then generators.
    Raises UserError if it cannot listen for agents.
    """

    def __init__(
        self,
        config: RunConfig,
        needs: Needs,
        secret: RunKey,
        driver: DriverProcess,
        opened: messages.Opened,
        slots: tuple[Slot, ...],
        say: Callable[[str], None],
    ) -> None:
        self.node_ip = config.launcher.ray.bind_address or opened.node_ip
        """Address of this machine for the other nodes."""
        needs = dataclasses.replace(needs, ours=replace(needs.ours, ip=self.node_ip))
        advice = "launcher.ray.bind_address must be an address that the other nodes can reach"
        super().__init__(config, needs, secret, say, listen=f"{self.node_ip}:*", advice=advice)
        self._log, self._driver = driver.log, driver
        self._slot = slots[-1]
        self._joiners: set[str] = set()
        """Names of the slots of generators that have joined."""
        self._reserving: dict[str, asyncio.Future[str]] = {}
        self._fixed = {slot.name for slot in slots}
        self._trouble: str | None = None
        """Cause of the first loss."""
        self._lost: AsyncrlError | None = None
        # A process's slot is its own; a replacement has its predecessor's.
        self.roster.may_host = lambda spec, agent: _is_of(spec.name.split(".")[0], agent)
        self.roster.hold_seconds = NODE_SECONDS
        driver.tell(messages.Serve(self.address, secret.secret))
        self.begin(self._hear())

    def on_lost(self, tell: Callable[[AsyncrlError], None]) -> None:
        """Register a callback for the loss of the cluster; it is called now if that is lost."""
        super().on_lost(tell)
        if self._lost is not None:
            tell(self._lost)

    def threads_of(self, role: Role) -> int:
        """Return the threads of a process: by default, the cores of its bundle."""
        launcher = self._config.launcher
        if role == "relay":
            return 1
        bundle = launcher.ray.trainer if role == "trainer" else launcher.ray.generator
        return launcher.threads or max(1, int(bundle.cpus))

    async def _hear(self) -> None:
        while (message := await self._driver.hear()) is not None:
            match message:
                case messages.Lost(name=name, cause=cause):
                    self._trouble = self._trouble or f"{name}: {cause}"
                    released = name not in self._fixed | self._joiners  # so nothing failed
                    self._agents_lost(cause, partial(_is_of, name), node=released)
                case messages.NodeLeft(node=node):
                    cause = "its node left the Ray cluster"
                    self._agents_lost(cause, partial(_is_on, node), node=True)
                case messages.Reserved(name=name, reason=reason):
                    if name in self._reserving and not self._reserving[name].done():
                        self._reserving[name].set_result(reason)
                case messages.HeadLost(reason=reason, agents_too=agents_too):
                    self.roster.hold_seconds = 0.0
                    self.roster.silence_seconds = SILENT_SECONDS
                    self._cluster_lost(reason, agents_too=agents_too)
            self.changed.set()
        cause = f"the Ray driver ended: {self._driver.last_line()}; see {self._log}"
        self._cluster_lost(cause, agents_too=True)

    def _agents_lost(self, cause: str, which: Callable[[Agent], bool], node: bool = False) -> None:
        for agent in [one for one in self.roster.agents.values() if which(one)]:
            self.roster.lose(agent, cause, with_machine=node)

    def _cluster_lost(self, reason: str, *, agents_too: bool) -> None:
        if agents_too:
            self._agents_lost(reason, lambda _one: True)
        if self._lost is None:
            self._lost = AsyncrlError(reason)
            self._trouble = self._trouble or reason
            self._on_lost(self._lost)

    async def make_room(self, generators: Sequence[int]) -> None:
        """Reserve a slot for each that has none. Raises UserError if Ray has too little room."""
        names = [f"generator-{index}" for index in generators]
        missing = [name for name in names if name not in self._fixed | self._joiners]
        reasons = await asyncio.gather(*map(self._reserve, missing))
        refused = [reason for reason in reasons if reason]
        if refused:
            for name, reason in zip(missing, reasons, strict=True):
                if not reason:
                    self._driver.tell(messages.GiveBack(name))
            raise UserError(refused[0])
        self._joiners |= set(missing)

    async def _reserve(self, name: str) -> str:
        """Reserve a slot; return why that failed, empty if it is reserved."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reserving[name] = answer
        self._driver.tell(messages.Reserve(replace(self._slot, name=name), ROOM_SECONDS))
        try:
            async with asyncio.timeout(ROOM_SECONDS + ANSWER_SECONDS):
                return await answer
        except TimeoutError:
            self._driver.tell(messages.GiveBack(name))
            return (
                f"the Ray driver did not answer within {ROOM_SECONDS + ANSWER_SECONDS:g} s; see "
                f"{self._log}"
            )
        finally:
            del self._reserving[name]

    def give_room_back(self, generator: int) -> None:
        """Release the slot of a generator that joined; those of the start are one group."""
        name = f"generator-{generator}"
        if name in self._joiners:
            self._joiners.discard(name)
            self._driver.tell(messages.GiveBack(name))

    def why_hopeless(self) -> str | None:
        """Return why the agents that the run begins with will not all come; None if they may."""
        return self._trouble or next(iter(self.roster.of_no_use()), None)

    async def close(self) -> None:
        """End the agents, then the driver with all that Ray has started. Bounded."""
        await super().close()
        await self._driver.close()


def _is_of(slot: str, agent: Agent) -> bool:
    return agent.name.rpartition("-")[0] == slot


def _is_on(node: str, agent: Agent) -> bool:
    return agent.info is not None and agent.info.id == node


async def open_ray(
    config: RunConfig,
    slots: tuple[Slot, ...],
    needs: Needs,
    records: ProcessRecords,
    closing: AsyncExitStack,
    say: Callable[[str], None],
    logs: Path,
) -> RayLauncher:
    """Connect, reserve room until `closing`, and wait for the agents. Raises UserError."""
    check_ray()
    settings = config.launcher.ray
    image = {} if settings.image is None else {"image_uri": settings.image}
    environment = settings.runtime_env | image
    limits = settings.connect_seconds, settings.place_seconds
    asked = messages.Open(settings.address, slots, settings.strategy, environment, *limits)
    driver = await DriverProcess.start(logs / "ray.log")
    records.add("ray", driver.process.pid)  # a resumed run ends what is left of this one
    try:
        driver.tell(asked)
        opened = await driver.opened()
        say(f"Ray cluster: {opened.address}")
        launcher = RayLauncher(config, needs, RunKey.new(), driver, opened, slots, say)
    except BaseException:
        driver.kill()
        await driver.close()
        raise
    closing.push_async_callback(launcher.close)
    place = f"on the Ray cluster {opened.address}"
    advice = f"look at {driver.log}, and at the logs of the nodes' workers"
    await gather(launcher, config, say, place=place, advice=advice, hopeless=launcher.why_hopeless)
    return launcher
