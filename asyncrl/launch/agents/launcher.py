"""The controller's side of the launcher of agents.

receive    consumes: messages of agents. produces: changes of the registry. waits for: agents
look       consumes: the clock. produces: orders to every agent, each second and when one changes.
           bounded by: BEAT_SECONDS
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from string import ascii_lowercase

import zmq
from msgspec.structs import replace

from asyncrl.config.run_config import RunConfig
from asyncrl.errors import AsyncrlError, UserError
from asyncrl.launch.agents.registry import AgentRegistry, Needs
from asyncrl.launch.agents.secret import HUB
from asyncrl.launch.child_spec import ChildKeys, ChildSpec, Role
from asyncrl.launch.interface import ProcessHandle, Say
from asyncrl.launch.start_order import inline_config
from asyncrl.wire import Hub, RunKey
from asyncrl.wire.messages import from_agent, to_agent
from asyncrl.wire.transport.refusals import Refusals

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
HEARD_SECONDS = 3.0
"""An agent that was silent for this long is not sent anything until it is heard again."""


class AgentsLauncher:
    """Starts processes on the machines of agents. Create it within the event loop.

    `listen` is `HOST:PORT` for agents, where `*` lets the system choose the port. If it cannot
    listen there, it raises UserError with `advice`.
    """

    def __init__(
        self, config: RunConfig, needs: Needs, secret: RunKey, say: Say, listen: str, advice: str
    ) -> None:
        self._config = config
        letters = "".join(secrets.choice(ascii_lowercase) for _ in range(8))  # unlike a process id
        self.run_id = f"{config.run.name}-{letters}"
        self._loop = asyncio.get_running_loop()
        self.roster = AgentRegistry(needs, secrets.token_hex(8), self._wake, say)
        self._woken = False
        self.changed = asyncio.Event()
        """Set after each message of an agent."""
        try:
            self._hub: Hub[from_agent.FromAgent] = Hub(
                f"tcp://{listen}", secret.hub(HUB), from_agent.FromAgent, Refusals()
            )
        except zmq.ZMQError as error:
            raise UserError(
                f"this machine cannot listen for agents at {listen} ({error.strerror}); {advice}"
            ) from error
        self.address = self._hub.address.removeprefix("tcp://")
        """`HOST:PORT` at which it listens."""
        self._on_lost: Callable[[AsyncrlError], None] = lambda _error: None
        self._tasks: list[asyncio.Task[None]] = []
        self.begin(self._receive())
        self.begin(self._look())

    def begin(self, loop: Coroutine[None, None, None]) -> None:
        """Run a loop of this launcher until it is closed."""
        task = asyncio.create_task(loop)
        self._tasks.append(task)
        task.add_done_callback(self._task_ended)

    def on_lost(self, tell: Callable[[AsyncrlError], None]) -> None:
        """Register a callback for internal launcher failures."""
        self._on_lost = tell

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a loop of the launcher of agents failed", exc_info=error)
            self._on_lost(AsyncrlError(f"the launcher of agents failed: {error!r}"))

    async def _receive(self) -> None:
        while True:
            name, message = await self._hub.receive()
            now = time.monotonic()
            if isinstance(message, from_agent.Hello):
                self._hub.send_soon(name, self.roster.hello(name, message, now))
            elif not self.roster.state(name, message, now):
                # It is of another session, or was given up: it ends its processes and says hello.
                self._hub.send_soon(name, to_agent.Orders(to_agent.NO_SESSION))
            else:
                self.roster.place()
            self.changed.set()

    async def _look(self) -> None:
        while True:
            self.roster.look(time.monotonic())
            self._send()
            self.changed.set()
            await asyncio.sleep(BEAT_SECONDS)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended
            self._loop.call_soon_threadsafe(self._send)

    def _send(self) -> None:
        heard_since = time.monotonic() - HEARD_SECONDS
        for agent in self.roster.agents.values():
            if agent.info is not None and agent.heard > heard_since:
                self._hub.send_soon(agent.name, self.roster.orders(agent))

    @property
    def threads(self) -> int:
        """Threads of a generator."""
        return self.threads_of("generator")

    def threads_of(self, role: Role) -> int:
        """Return the threads of a process, which has its agent's cores to itself."""
        return 1 if role == "relay" else self._config.launcher.threads or 1

    @property
    def uses_relays(self) -> bool:
        """True if the run is on several machines, or `relays` is `always`."""
        return self.roster.machines.are_several

    async def make_room(self, generators: Sequence[int]) -> None:
        """Check that agents have room. Raises UserError if there are too few."""
        offered = self.roster.offered()
        if offered < len(generators):
            raise UserError(
                f"{len(generators)} more generator(s) need an agent each, and {offered} agent(s) "
                "wait for work: start more (`asyncrl agent --role generator`), then order it again"
            )

    def give_room_back(self, _generator: int) -> None:
        """Do nothing: an agent without a process has room."""

    def start(self, spec: ChildSpec, keys: ChildKeys, node: str | None = None) -> ProcessHandle:
        """Order an agent to start `python -m asyncrl.child`, without waiting."""
        full = replace(
            spec,
            threads=self.threads_of(spec.role),
            run_id=self.run_id,
            weights_directory=self._config.launcher.cluster.weights_directory,
            config_json=inline_config(self._config),
        )
        return self.roster.add(full, keys, node)

    def use(self, config: RunConfig) -> None:
        """Start processes with this configuration from now on."""
        self._config = config

    async def close(self) -> None:
        """Send all agents the end of the run, and stop listening."""
        for agent in self.roster.agents.values():
            over = to_agent.Over(self.roster.session, f"run {self._config.run.name} has ended")
            self._hub.send_soon(agent.name, over)
        await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        self._hub.close()
