"""The controller's side of `launcher.kind: ray`: the launcher of agents, whose agents Ray starts.

messages   consumes: what the process that speaks to Ray says. produces: losses for the registry.
           waits for: that process. unblocked by: its end.

That process and all that Ray has started end when its pipe is closed, which the kernel does if the
controller is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.launch.agents.agent_state import Agent
from asyncrl.launch.agents.launcher import AgentsLauncher
from asyncrl.launch.agents.registry import Needs
from asyncrl.launch.agents.wait_for_agents import gather
from asyncrl.launch.child_spec import ChildSpec, Role
from asyncrl.launch.ray import messages
from asyncrl.launch.ray.messages import Slot
from asyncrl.launch.records import ProcessRecords
from asyncrl.wire import RunKey

DRIVER_MODULE = "asyncrl.launch.ray.driver"
CLOSE_SECONDS = 30.0
"""Longest wait for the driver's end; it bounds itself to less."""
FIRST_SECONDS = 30.0
"""Longest time for the driver's imports."""
ROOM_SECONDS = 6.0
"""Longest wait for room for a joiner. The user waits for the answer, for 10 s."""
ANSWER_SECONDS = 2.0
"""Longest wait for the driver's answer, in addition."""
NODE_SECONDS = 3.0
"""Time for the head to find out that a node is gone."""
SILENT_SECONDS = 20.0
"""An agent that says nothing for this long is lost, once no head can tell that it is."""
_UNAUTHENTICATED = "InvalidAuthToken"
"""Ray says so in its log and tries again, as long as it is let."""


def check_ray() -> None:
    """Refuse to run without Ray. Raises UserError."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "launcher.kind: ray needs Ray, which is not installed: make setup EXTRAS=ray, or pip "
            "install 'asyncrl[ray]', on every node; or use launcher.kind: local"
        )


@dataclass(slots=True)
class DriverProcess:
    """The process that speaks to Ray."""

    process: asyncio.subprocess.Process
    log: Path

    @classmethod
    async def start(cls, log: Path) -> DriverProcess:
        """Start it."""
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", DRIVER_MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the controller
            )
        return cls(process, log)

    def tell(self, message: messages.ToDriver) -> None:
        """Send a message; what it does not read waits here."""
        assert self.process.stdin is not None  # noqa: S101
        self.process.stdin.write(messages.line(message))

    async def hear(self) -> messages.FromDriver | None:
        """Its next message; None: it has ended."""
        assert self.process.stdout is not None  # noqa: S101
        text = await self.process.stdout.readline()
        return messages.FROM_DRIVER.decode(text) if text.endswith(b"\n") else None

    async def opened(self) -> messages.Opened:
        """Wait until there is room, stage by stage. Raises UserError: there is none."""
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
                        f"waited for {what}, but the process that speaks to Ray ended; its last "
                        f"words: {self.last_words()}"
                    )

    def _silent(self, what: str) -> str:
        if _UNAUTHENTICATED in self.last_words():
            return (
                "the Ray head asks for a token, and there is none here or another one: set "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (or RAY_AUTH_TOKEN) for asyncrl "
                "run, as for `ray start` on every node"
            )
        return (
            f"waited for {what}, and it did not come in time. A head that is dead or behind a "
            "firewall does not refuse a connection, it is silent: look at it with `ray status "
            "--address=HOST:PORT` from this machine"
        )

    def last_words(self) -> str:
        """The last line of its log."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return next((line for line in reversed(lines) if line.strip()), "(its log is empty)")

    def kill(self) -> None:
        """End it at once; Ray ends what a driver has left behind."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def close(self) -> None:
        """Close its pipe, on which it ends; kill it if it does not, or if this is cancelled."""
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

    Args:
        config: of the run.
        needs: of the run.
        secret: of the run's agents.
        driver: has room for them.
        opened: what it said.
        slots: that it has room for: those of the trainer's ranks, then the generators'.
        say: tells the user something.

    Raises:
        UserError: it cannot listen for agents.
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
        """Of this machine, as the other nodes know it."""
        super().__init__(
            config,
            dataclasses.replace(needs, ours=replace(needs.ours, ip=self.node_ip)),
            secret,
            say,
            listen=f"{self.node_ip}:*",
            advice="launcher.ray.bind_address must be one of this machine's own addresses, which "
            "the other nodes can reach",
        )
        self._log, self._driver = driver.log, driver
        self._slot = slots[-1]
        """Of any generator."""
        self._joiners: set[str] = set()
        """Generators that have joined, by the names of their slots."""
        self._reserving: dict[str, asyncio.Future[str]] = {}
        self._fixed = {slot.name for slot in slots}
        self.troubles: list[str] = []
        """Why agents were lost before the run has begun."""
        self._lost: AsyncrlError | None = None
        self.roster.may_host = _is_its_slot
        self.roster.hold_seconds = NODE_SECONDS
        driver.tell(messages.Serve(self.address, secret.secret))
        self.begin(self._hear())

    def on_lost(self, tell: Callable[[AsyncrlError], None]) -> None:
        """Have somebody told that the cluster is lost."""
        super().on_lost(tell)
        if self._lost is not None:
            tell(self._lost)

    def threads_of(self, role: Role) -> int:
        """Of a process: the cores of its bundle, unless the user says otherwise."""
        launcher = self._config.launcher
        if role == "relay":
            return 1
        bundle = launcher.ray.trainer if role == "trainer" else launcher.ray.generator
        return launcher.threads or max(1, int(bundle.cpus))

    async def _hear(self) -> None:
        while (message := await self._driver.hear()) is not None:
            match message:
                case messages.Lost(name=name, cause=cause):
                    self.troubles.append(f"{name}: {cause}")
                    self._agents_lost(cause, partial(_is_of, name))
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
        cause = f"the process that speaks to Ray ended: {self._driver.last_words()}"
        self._cluster_lost(cause, agents_too=True)

    def _agents_lost(
        self, cause: str, which: Callable[[Agent], bool], *, node: bool = False
    ) -> None:
        for agent in [one for one in self.roster.agents.values() if which(one)]:
            self.roster.lose(agent, cause, with_machine=node)

    def _cluster_lost(self, reason: str, *, agents_too: bool) -> None:
        if agents_too:
            self._agents_lost(reason, lambda _one: True)
        if self._lost is None:
            self._lost = AsyncrlError(reason)
            self.troubles.append(reason)
            self._on_lost(self._lost)

    async def make_room(self, generators: Sequence[int]) -> None:
        """Reserve a slot for each that has none. Raises UserError: Ray does not give them."""
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
        """Ask for a slot; why it is not given, empty if it is."""
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reserving[name] = answer
        self._driver.tell(messages.Reserve(replace(self._slot, name=name), ROOM_SECONDS))
        try:
            async with asyncio.timeout(ROOM_SECONDS + ANSWER_SECONDS):
                return await answer
        except TimeoutError:
            self._driver.tell(messages.GiveBack(name))
            return (
                f"the process that speaks to Ray did not answer within "
                f"{ROOM_SECONDS + ANSWER_SECONDS:g} s; see {self._log}"
            )
        finally:
            del self._reserving[name]

    def give_room_back(self, generator: int) -> None:
        """Give back the slot of a joiner; those of the start are one group that stays."""
        name = f"generator-{generator}"
        if name in self._joiners:
            self._joiners.discard(name)
            self._driver.tell(messages.GiveBack(name))

    async def close(self) -> None:
        """End the agents, the driver and what it has started; waits, but not for ever."""
        await super().close()
        await self._driver.close()


def _is_of(slot: str, agent: Agent) -> bool:
    return agent.name.rpartition("-")[0] == slot


def _is_on(node: str, agent: Agent) -> bool:
    return agent.info is not None and agent.info.id == node


def _is_its_slot(spec: ChildSpec, agent: Agent) -> bool:
    """Whether a process belongs to an agent: replacements are where their predecessors were."""
    return _is_of(spec.name.split(".")[0], agent)


async def open_ray(
    config: RunConfig,
    slots: tuple[Slot, ...],
    needs: Needs,
    records: ProcessRecords,
    say: Callable[[str], None],
    logs: Path,
) -> RayLauncher:
    """Connect, reserve room, and wait for the agents that Ray starts there.

    Raises:
        UserError: there is no such cluster, or it cannot carry the run. Nothing is left running.
    """
    check_ray()
    settings = config.launcher.ray
    image = {} if settings.image is None else {"image_uri": settings.image}
    asked = messages.Open(
        settings.address,
        slots,
        settings.strategy,
        settings.runtime_env | image,
        settings.connect_seconds,
        settings.place_seconds,
    )
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
    try:
        await gather(
            launcher,
            config,
            say,
            place=f"on the Ray cluster {opened.address}",
            advice=f"look at {driver.log}, and at the logs of the nodes' workers",
            hopeless=lambda: _hopeless(launcher),
        )
    except BaseException:
        await launcher.close()
        raise
    return launcher


def _hopeless(launcher: RayLauncher) -> str | None:
    """Why the agents that the run begins with will not all come; None: they may."""
    reasons = launcher.troubles + launcher.roster.of_no_use()
    return reasons[0] if reasons else None
