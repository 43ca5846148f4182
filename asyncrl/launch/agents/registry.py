"""The agents of a run, their processes, and who gets which. It has neither sockets nor a clock.

    Hello ──► welcomed ──► State ──► known: has room for one trainer or generator
                                     │ is silent for a while: lost, together with its processes
                                     │ has had a child that failed: chosen last

A process waits here until an agent has room for it. The trainer's come first, all ranks at once:
one alone would only wait for the others. A relay goes to an agent of its node and takes no room.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from asyncrl.launch.agents.agent_state import Agent, AgentProcess, info_of, out_of_reach
from asyncrl.launch.child_spec import ChildKeys, ChildSpec, RelaySpec, Role, TrainerSpec
from asyncrl.launch.nodes import Machines, NodeInfo, unfit
from asyncrl.wire.messages import from_agent, to_agent


@dataclass(eq=False)
class NeededGpus:
    """GPUs of the trainer and of each generator; optional roles can run without."""

    _wanted: dict[str, int]
    _optional: frozenset[str]
    _agents: Mapping[str, Agent]
    _say: Callable[[str], None]

    def of(self, role: str) -> int:
        """Return the GPUs of a role. Optional ones count as long as any agent for it has them."""
        wanted = self._wanted.get(role, 0)
        if role not in self._optional:
            return wanted
        fitting = [one for one in self._agents.values() if one.hello.role in (role, "any")]
        return wanted if any(one.hello.gpus >= wanted for one in fitting) else 0

    def settle(self) -> None:
        """Fix the present GPUs, at the start of the run, for agents that come later."""
        for role in sorted(self._optional):
            wanted, self._wanted[role] = self._wanted[role], self.of(role)
            if self._wanted[role] < wanted:
                self._say(
                    f"no agent for a {role} has the GPUs that it could use, so it runs on the CPU, "
                    "on machines that join later as well"
                )
        self._optional = frozenset()


_TERMINATED = (0, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of processes of a machine that is shut down."""
_SPARE = "; this is a spare"
_LATE_SECONDS = 5.0
"""If `look` is called this late, the controller itself was suspended or blocked in between."""


@dataclass(frozen=True, slots=True)
class Needs:
    """A run's requirements for the machines of its agents."""

    run: str
    question: str
    ours: NodeInfo
    model: str
    run_directory: str
    gpus: dict[str, int]
    """GPUs of each trainer rank and of each generator, by role."""
    optional_gpus: frozenset[str]
    """Roles that run on the CPU if the first agents lack GPUs for them (`device: auto`)."""
    mark: str
    silence_seconds: float
    silence_setting: str
    """Name of the setting `silence_seconds` comes from."""
    lost_seconds: float
    relay_per_node: bool


class AgentRegistry:
    """Knows every agent and every process."""

    def __init__(
        self, needs: Needs, session: str, wake: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self._needs = needs
        self.session = session
        self._wake = wake
        self._say = say
        self.agents: dict[str, Agent] = {}
        """Agents that are not lost, by name, in order of arrival."""
        self.waiting: list[AgentProcess] = []
        self.machines = Machines(needs.ours.memory, (), always=needs.relay_per_node)
        self._looked: float | None = None
        self.silence_seconds = needs.silence_seconds
        """An agent that is silent for this long is lost."""
        self.hold_seconds = 0.0
        """Delay before a process's end counts, so that a loss of its machine is known first."""
        self.may_host: Callable[[ChildSpec, Agent], bool] = lambda _spec, _agent: True
        """Returns True if a process may be started by an agent that has room for it."""
        self.gpus = NeededGpus(dict(needs.gpus), needs.optional_gpus, self.agents, say)
        self.is_ready: Callable[[str], bool] = lambda _name: False
        """Returns True if a process has reported that it can take work."""

    def hello(
        self, name: str, hello: from_agent.Hello, now: float
    ) -> to_agent.Welcome | to_agent.Refused:
        """Handle Hello from an idle agent."""
        needs, ours = self._needs, self._needs.ours
        known = self.agents.get(name)
        if known is not None and known.hello.beginning != hello.beginning:
            self.lose(known, "it has ended its processes and begins anew")
            known = None
        if hello.asyncrl != ours.asyncrl or hello.python != ours.python:
            reason = (
                f"agent {name} has asyncrl {hello.asyncrl or '(none)'} and Python {hello.python}, "
                f"and the controller of run {needs.run} has asyncrl {ours.asyncrl} and Python "
                f"{ours.python}: use the same image, or install the same, for all"
            )
            self._say(f"refused: {reason}")
            return to_agent.Refused(reason)
        if known is None:
            self.agents[name] = Agent(name, hello, now, home=ours.ip)
        return to_agent.Welcome(self.session, needs.run, needs.question, needs.lost_seconds)

    def state(self, name: str, state: from_agent.State, now: float) -> bool:
        """Handle an agent's state; return True if it belongs to this session."""
        agent = self.agents.get(name)
        if agent is None or state.session != self.session:
            return False
        agent.heard = now
        if agent.info is None and state.facts:
            agent.info = info_of(agent, state.facts)
            self.machines.note(agent.info)
            unfit = self.unfit(agent, "trainer" if agent.hello.role == "trainer" else "generator")
            why_idle = "" if unfit is None else f", but cannot be used: {unfit}"
            self._say(f"agent {agent} has joined{why_idle}")
        if state.leaves_in is not None and agent.leaves_at is None:
            agent.leaves_at = now + state.leaves_in
            self._say(f"agent {agent} leaves, within {state.leaves_in:.0f} s")
        for hosted in state.processes:
            process = agent.processes.get(hosted.name)
            if process is None or self._may_be_lost(process, hosted, now):
                continue
            process.reported = hosted
            if hosted.code is not None:
                del agent.processes[hosted.name]
                failed = hosted.code != 0 and not process.ending and agent.leaves_at is None
                agent.failures += failed and process.spec.role != "relay"
        if agent.leaves_at is not None and not agent.processes:
            del self.agents[name]  # it has left the run
        return True

    def _may_be_lost(self, process: AgentProcess, hosted: from_agent.Hosted, now: float) -> bool:
        """Return True while a process that ended may have ended with its machine."""
        agent = process.agent
        asked_for = process.ending or agent is None or agent.leaves_at is not None
        if hosted.code not in _TERMINATED or asked_for or process.spec.role == "relay":
            return False
        process.ended = now if process.ended is None else process.ended
        return now - process.ended < self.hold_seconds

    def unfit(self, agent: Agent, role: Role) -> str | None:
        """Return why a process of this role cannot run on an agent's machine; None if it can."""
        if agent.info is None:
            return "it has not described its machine yet"
        needs = self._needs
        if (reason := unfit(f"the {role}", agent.info, needs.ours, needs.model)) is not None:
            return reason
        if role == "trainer" and not agent.info.shares_run_directory:
            return (
                f"the trainer's agent must see the run's folder {needs.run_directory}, where "
                f"checkpoints go, and {agent.info} does not: mount the same volume there, and give "
                "--runs if its path differs there"
            )
        if (reason := out_of_reach(agent, self.agents.values())) is not None:
            return reason
        wanted = self.gpus.of(role)
        if agent.hello.gpus < wanted:
            return f"the {role} needs {wanted} GPU(s), and {agent.info} has {agent.hello.gpus}"
        return None

    def of_no_use(self) -> list[str]:
        """Return for the user why waiting agents cannot be used, one text each."""
        notes = [(str(one), self._note(one)) for one in self.agents.values()]
        return [f"{one}: {note}" for one, note in notes if note and not note.endswith(_SPARE)]

    def free(self, role: Role, *, fresh: bool = False) -> list[Agent]:
        """Return agents with room, best first; with `fresh`, only those without failures."""
        found = [
            agent
            for agent in self.agents.values()
            if agent.hello.role in (role, "any")
            and agent.work is None
            and agent.leaves_at is None
            and not (fresh and agent.failures)
            and self.unfit(agent, role) is None
        ]
        return sorted(found, key=lambda agent: (agent.failures, agent.hello.role == "any"))

    def could_begin_with(self, ranks: int = 1) -> tuple[int, int]:
        """Count the trainer's ranks that have agents, and the generators besides."""
        trainers, generators = self.free("trainer")[:ranks], self.free("generator")
        return len(trainers), len(generators) - sum(one in generators for one in trainers)

    def offered(self) -> int:
        """Count the generators that agents have room for, besides those that wait."""
        count = len(self.free("generator", fresh=True))
        for waiting in self.waiting:
            may_take = waiting.spec.role == "generator" or not self.free("trainer")
            count -= may_take and waiting.spec.role != "relay"
        return max(0, count)

    def leaving(self) -> list[str]:
        """Return the names of trainers and generators whose agents will end."""
        leavers = [one.work for one in self.agents.values() if one.leaves_at is not None]
        return [work.spec.name for work in leavers if work is not None]

    def add(self, spec: ChildSpec, keys: ChildKeys, node: str | None) -> AgentProcess:
        """Add a process to be started; `node` is that of a relay."""
        process = AgentProcess(spec, keys, self._node_of, self._wake)
        if node is None:
            self.waiting.append(process)
            self.place()
            return process
        for agent in self.agents.values():
            if agent.info is not None and self._node_of(agent) == node and agent.leaves_at is None:
                self._give(process, agent)
                return process
        process.lose("no agent of its machine is left")
        return process

    def place(self) -> None:
        """Assign waiting processes to agents that have room, the trainer first."""
        self.waiting = [one for one in self.waiting if one.exit_code() is None]
        ranks = [one.spec for one in self.waiting if isinstance(one.spec, TrainerSpec)]
        wanted = ranks[0].ranks if ranks else 0
        incomplete = len(ranks) < wanted or len(self.free("trainer")) < wanted
        for process in sorted(self.waiting, key=lambda one: one.spec.role != "trainer"):
            spec = process.spec
            if spec.role == "trainer" and incomplete:
                continue
            found = [one for one in self.free(spec.role) if self.may_host(spec, one)]
            if incomplete:  # what a rank may need is kept for it
                found = [one for one in found if one.hello.role == spec.role]
            if found:
                self.waiting.remove(process)
                self._give(process, found[0])

    def _give(self, process: AgentProcess, agent: Agent) -> None:
        assert agent.info is not None  # noqa: S101 - it is known
        spec = replace(process.spec, shares_run_directory=agent.info.shares_run_directory)
        if not isinstance(spec, RelaySpec):
            spec = replace(spec, gpus=self.gpus.of(spec.role))
            self._say(f"{spec.name}: agent {agent} at {agent.info}")
        process.spec, process.agent = spec, agent
        agent.processes[spec.name] = process
        self._wake()

    def _node_of(self, agent: Agent) -> str:
        assert agent.info is not None  # noqa: S101 - it has a process
        return self.machines.name_of(agent.info)

    def orders(self, agent: Agent) -> to_agent.Orders:
        """Return all orders for an agent."""
        needs = self._needs
        wanted = tuple(
            one.wanted(needs.mark, needs.relay_per_node, self.is_ready(name))
            for name, one in agent.processes.items()
        )
        return to_agent.Orders(self.session, wanted, self._note(agent))

    def _note(self, agent: Agent) -> str:
        if agent.work is not None or agent.info is None or agent.leaves_at is not None:
            return ""
        roles: list[Role] = ["trainer", "generator"]
        reasons = [self.unfit(agent, role) for role in roles if agent.hello.role in (role, "any")]
        if all(reason is not None for reason in reasons):
            return str(reasons[0])
        return f"run {self._needs.run} needs no further {agent.hello.role} now{_SPARE}"

    def look(self, now: float) -> None:
        """Check for agents that are silent, or did not leave in time."""
        missed = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        for agent in list(self.agents.values()):
            if missed > _LATE_SECONDS:
                agent.heard = min(now, agent.heard + missed)
            silent, key = now - agent.heard, self._needs.silence_setting
            if silent > self.silence_seconds:
                self.lose(agent, f"it was silent for {silent:.0f} s ({key})")
        self.place()

    def lose(self, agent: Agent, why: str, *, with_machine: bool = True) -> None:
        """Remove a lost agent and its processes; `with_machine`: they are not at fault."""
        del self.agents[agent.name]
        lost = f"agent {agent} was lost: {why}"
        if not agent.processes:
            self._say(lost)
        for process in agent.processes.values():
            process.lose(f"its {lost}", with_machine=with_machine)
