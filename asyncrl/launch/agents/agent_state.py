"""The controller's view of an agent and of a process on its machine."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from asyncrl.launch.child_spec import ChildKeys, ChildSpec
from asyncrl.launch.nodes import NodeInfo
from asyncrl.launch.start_order import start_order
from asyncrl.wire.messages import from_agent, to_agent

LOST = -9
_TERMINATED = -15


@dataclass(eq=False)
class AgentProcess:
    """A process on an agent's machine."""

    spec: ChildSpec
    keys: ChildKeys
    _node_of: Callable[["Agent"], str]
    _wake: Callable[[], None]
    """Sends orders to agents; any thread or signal handler may call it."""
    agent: "Agent | None" = field(default=None, init=False)
    ending: bool = field(default=False, init=False)
    by_force: bool = field(default=False, init=False)
    reported: from_agent.Hosted | None = field(default=None, init=False)
    ended: float | None = field(default=None, init=False)
    """Time of its agent's first report of an end that was not ordered (monotonic seconds)."""
    _lost: str = field(default="", init=False)
    _lost_with_machine: bool = field(default=False, init=False)

    def exit_code(self) -> int | None:
        """None while the process runs; negative for a signal, or if its agent was lost."""
        if self._lost:
            return LOST
        if self.reported is not None:
            return self.reported.code
        return _TERMINATED if self.ending and self.agent is None else None

    @property
    def node(self) -> str | None:
        """The node that it is on; None while it waits for an agent."""
        return None if self.agent is None else self._node_of(self.agent)

    @property
    def address(self) -> str:
        """Its machine's address for others; empty: the controller's machine, or not placed."""
        agent = self.agent
        if agent is None or agent.is_on_loopback or agent.hello.address == agent.home:
            return ""
        return agent.hello.address

    @property
    def lost_with_machine(self) -> bool:
        """True if its agent was lost, was ordered to end, or never came."""
        return self.agent is None or self._lost_with_machine or self.agent.leaves_at is not None

    def cause(self) -> str:
        """Return the reason of its end if the exit code does not say it, otherwise empty."""
        return self._lost or ("" if self.reported is None else self.reported.cause)

    def end(self, *, by_force: bool) -> None:
        """Order its agent to end the process, or to kill it and its children."""
        self.ending = True
        self.by_force |= by_force
        self._wake()

    def log_tail(self, lines: int = 12) -> str:
        """Return the last lines of its log, at most a few seconds old."""
        if self.reported is None:
            return "(waits for an agent)" if self.agent is None else "(is being started)"
        return "\n".join(self.reported.log_tail.splitlines()[-lines:]) or "(its log is empty)"

    def wanted(self, mark: str, relay_per_node: bool, ready: bool) -> to_agent.Wanted:
        """Return the order for its agent; the arguments are those of `start_order`."""
        start = None
        if self.reported is None:
            order = start_order(self.spec, mark=mark, relay_per_node=relay_per_node)
            start = to_agent.Start(order, msgspec.msgpack.encode(self.keys))
        return to_agent.Wanted(self.spec.name, start, self.ending, self.by_force, ready)

    def lose(self, cause: str, *, with_machine: bool = True) -> None:
        """Count the process as lost with its agent, unless it has ended."""
        if self.exit_code() is None:
            self._lost, self._lost_with_machine = cause, with_machine


@dataclass(slots=True)
class Agent:
    """One agent, from its first message to its loss."""

    name: str
    hello: from_agent.Hello
    heard: float
    """Time of its last message (monotonic seconds)."""
    info: NodeInfo | None = None
    processes: dict[str, AgentProcess] = field(default_factory=dict)
    """Processes that it runs or was ordered to start, without those that have ended."""
    failures: int = 0
    leaves_at: float | None = None
    """Time at which it will end (monotonic seconds); None: it stays."""
    home: str = ""
    """The controller's address, if its machine's agents connect from there."""

    def __str__(self) -> str:
        return f"{self.name} ({self.hello.role})"

    @property
    def is_on_loopback(self) -> bool:
        """True if its machine's address is valid on that machine only."""
        return self.hello.address.startswith(("127.", "localhost"))

    @property
    def work(self) -> AgentProcess | None:
        """Its trainer or generator."""
        found = (one for one in self.processes.values() if one.spec.role != "relay")
        return next(found, None)


def info_of(agent: Agent, facts: str) -> NodeInfo:
    """Parse an agent's facts about its machine, JSON."""
    found: dict[str, object] = msgspec.json.decode(facts)
    known = {"id": agent.name} | found | {"ip": agent.hello.address}
    info = msgspec.convert(known, NodeInfo)
    # Two containers may share memory and not the folder in which processes of a node meet.
    return replace(info, memory=f"{info.memory} {info.disk}")


def out_of_reach(agent: Agent, everyone: Iterable[Agent]) -> str | None:
    """Return why an agent's processes and other machines cannot connect; None if they can."""
    advice = "start that agent with --advertise and its machine's address"
    for one in everyone:
        if agent.is_on_loopback and not one.is_on_loopback:
            return f"it reaches the controller at {agent.hello.address} only, others not: {advice}"
        if one.is_on_loopback and one.work is not None and not agent.is_on_loopback:
            return f"agent {one} has a process at {one.hello.address}: {advice}"
    return None
