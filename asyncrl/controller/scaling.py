"""Generators that join and leave a run while it trains: by `asyncrl scale`, and with their agents.

    an idle agent                ──► one more generator, up to the bound
    an agent that will end       ──► its generator leaves as after `asyncrl scale`, its trainer ends
                                     after a checkpoint, and another agent gets the next one
    no agent for what is needed  ──► the run waits, for `launcher.agents.place_seconds`

While other generators exist, one that was lost with its agent is replaced when an agent comes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.controller.training import Training
from asyncrl.errors import RunFailed, UserError
from asyncrl.evaluation.fleet import FleetEvaluation
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.fleet.process_state import GeneratorWorker, TrainerRank
from asyncrl.launch.agents.launcher import AgentsLauncher
from asyncrl.scheduler.events import GeneratorLeaves
from asyncrl.steering.user_commands import Effect, last_scale
from asyncrl.wire.messages import to_trainer
from asyncrl.wire.messages.control import ScaleRequest
from asyncrl.wire.messages.to_generator import Shutdown
from asyncrl.wire.records.wrong_policy import listed


@dataclass(eq=False)
class Scaling:
    """Adjusts the number of generators to what was ordered.

    Those with the highest indices leave: they get no more work, and their samples move
    (`scheduler.scheduler`). A joiner that is ready installs the newest weights and gets work.
    """

    _fleet: Fleet
    _training: Training
    _evaluation: FleetEvaluation
    ordered: int | None = field(default=None, init=False)

    async def carry_out(self, order: ScaleRequest) -> Effect:
        """Begin to scale, and describe what happens now. Raises UserError if that is impossible."""
        if order.generators < 1:
            raise UserError(
                f"a run needs at least one generator, and {order.generators} were ordered; "
                "`asyncrl pause` stops generation, `asyncrl stop` ends the run"
            )
        return Effect(await self._change(order), before=self._fleet.config.generators)

    async def _change(self, order: ScaleRequest) -> str:
        present = self._fleet.ordered
        missing = order.generators - len(present)
        launcher = self._fleet.config
        most = launcher.agents.max_generators if launcher.kind == "agents" else None
        if most is not None and order.generators > most:
            raise UserError(f"launcher.agents.max_generators allows {most} generators")
        if missing > 0:
            indices = self._fleet.free_indices(missing)
            await self._fleet.make_room(indices)
            names = [self._fleet.join(index) for index in indices]
            self.ordered = order.generators
            return f"{listed(names)} will join"
        self.ordered = order.generators
        leavers = present[order.generators :]
        for worker in leavers:
            await self.leave(worker)
        if leavers:
            return f"{listed([one.name for one in leavers])} will leave"
        return f"the run has {len(present)} generator(s) already"

    async def leave(self, worker: GeneratorWorker) -> None:
        """Remove a generator from the run; its samples move to others."""
        is_ready = worker.is_ready
        self._fleet.leave(worker)
        if not is_ready:
            return
        await self._evaluation.lost(worker)  # others generate its held-out samples
        if self._training.has_begun:
            await self._training.apply(GeneratorLeaves(worker.name))
        else:
            await self._fleet.send(worker.name, Shutdown())


@dataclass(eq=False)
class AgentAutoscaling:
    """Polls the agents. `_why_closed` returns why the run cannot be changed now, or None."""

    _agents: AgentsLauncher
    _fleet: Fleet
    _scaling: Scaling
    _why_closed: Callable[[], str | None]
    _say: Callable[[str], None]
    _told: set[str] = field(default_factory=set, init=False)
    """Processes that were ordered to leave with their agent."""
    _alone_since: float | None = field(default=None, init=False)

    async def check(self) -> None:
        """Add and remove generators with their agents. Raises RunFailed if none came in time."""
        is_closed = self._why_closed() is not None
        for name in self._agents.roster.leaving():
            await self._leave(name, is_closed=is_closed)
        if is_closed:
            return
        self._join()
        self._wait_for_a_generator()
        self._name_those_that_wait()

    async def _leave(self, name: str, *, is_closed: bool) -> None:
        worker = next((one for one in self._fleet.alive if one.name == name), None)
        if worker is None or name in self._told:
            return
        others = [one for one in self._fleet.generators() if one is not worker]
        if is_closed and (isinstance(worker, TrainerRank) or not others):
            return  # nothing could take its place any more, so it works as long as it may
        self._told.add(name)
        if isinstance(worker, GeneratorWorker):
            await self._scaling.leave(worker)
            return
        for rank in self._fleet.ranks:  # they are one unit, and a checkpoint is of all
            rank.gives_way = rank is not worker
            self._told.add(rank.name)
            if not worker.is_ready:
                rank.handle.end(by_force=False)
        if worker.is_ready:
            self._say(f"{name} leaves with its agent, after a checkpoint")
            await self._fleet.send_trainer(to_trainer.Shutdown(checkpoint=True))

    def _join(self) -> None:
        bounds = [self._fleet.config.agents.max_generators, self._scaling.ordered]
        most = min((one for one in bounds if one is not None), default=None)
        count = self._agents.roster.offered()
        if most is not None:
            count = min(count, most - len(self._fleet.ordered))
        for index in self._fleet.free_indices(max(0, count)):
            self._say(f"{self._fleet.join(index)} will join")

    def _name_those_that_wait(self) -> None:
        ordered = self._fleet.ordered
        for worker in [self._fleet.trainer, *(ordered if len(ordered) == 1 else ())]:
            if worker.waits_for_room and not worker.is_gone and not worker.is_said_to_wait:
                worker.is_said_to_wait = True
                ranks = len(self._fleet.ranks) if isinstance(worker, TrainerRank) else 1
                agents = "an agent" if ranks == 1 else f"agents for its {ranks} ranks"
                self._say(f"{worker.name} waits for {agents}, {self._limit}")

    def _wait_for_a_generator(self) -> None:
        if self._fleet.has_generators:
            self._alone_since = None
            return
        now, limit = time.monotonic(), self._fleet.config.agents.place_seconds
        if self._alone_since is None:
            self._alone_since = now
            self._say(f"no generator is left; the run waits for an agent, {self._limit}")
        elif now - self._alone_since > limit:
            raise RunFailed(
                f"no generator is left, and no agent came for one within {limit:.0f} s "
                "(launcher.agents.place_seconds); `asyncrl run CONFIG --continue` continues from "
                "the newest checkpoint"
            )

    @property
    def _limit(self) -> str:
        seconds = self._fleet.config.agents.place_seconds
        return f"for at most {seconds:.0f} s (launcher.agents.place_seconds)"


def arrivals_of(
    agents: AgentsLauncher | None,
    fleet: Fleet,
    scaling: Scaling,
    run: Path,
    why_closed: Callable[[], str | None],
    say: Callable[[str], None],
) -> AgentAutoscaling | None:
    """Create the poller of agents, if there are any; `run` is the run's folder."""
    if agents is None:
        return None
    agents.roster.is_ready = fleet.is_ready
    scaling.ordered = last_scale(run)
    return AgentAutoscaling(agents, fleet, scaling, why_closed, say)
