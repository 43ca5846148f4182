"""Agents that come and go: what is asked of their processes, without agents."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fake_processes import run_config, started_fleet

from asyncrl.controller.scaling import AgentAutoscaling, Scaling
from asyncrl.errors import UserError
from asyncrl.fleet.process_state import GeneratorWorker, cause_of_death
from asyncrl.wire.messages.control import ScaleRequest
from asyncrl.wire.messages.to_trainer import Shutdown

AGENTS = {"key_file": "k", "max_generators": 2}


class World:
    """A trainer and generators on agents, some of which are to end."""

    def __init__(self, generators: int, ranks: int = 1) -> None:
        launcher = {"kind": "agents", "generators": generators, "agents": AGENTS}
        config = run_config(launcher=launcher, trainer={"ranks": ranks})
        self.fleet, self.hub = started_fleet(config)
        self.left: list[str] = []
        self.leaving: list[str] = []
        self.closed: str | None = None
        self.free = 0
        roster = SimpleNamespace(leaving=lambda: self.leaving, offered=lambda: self.free)
        scaling = SimpleNamespace(leave=self._leave, ordered=None)
        agents: Any = SimpleNamespace(roster=roster)
        told: Any = scaling
        self.arrivals = AgentAutoscaling(
            agents, self.fleet, told, lambda: self.closed, lambda _: None
        )

    async def _leave(self, worker: GeneratorWorker) -> None:
        self.left.append(worker.name)

    def check(self) -> None:
        asyncio.run(self.arrivals.check())


def test_a_generator_hands_over_while_the_run_drains_and_nobody_joins() -> None:
    world = World(generators=2)
    world.closed, world.free = "the run is stopping", 2
    world.leaving = ["trainer", "generator-0"]
    world.check()
    assert world.left == ["generator-0"]
    assert world.hub.take() == [], "the trainer finishes what it can"
    assert len(world.fleet.ordered) == 2


def test_the_last_generator_of_a_run_that_drains_works_as_long_as_it_may() -> None:
    world = World(generators=1)
    world.closed, world.leaving = "the run is stopping", ["generator-0"]
    world.check()
    assert world.left == []
    world.closed = None
    world.check()
    assert world.left == ["generator-0"]


def test_all_ranks_of_a_trainer_leave_with_the_agent_of_one() -> None:
    world = World(generators=1, ranks=2)
    world.leaving = ["trainer-1"]
    world.check()
    told = [(name, message) for name, message in world.hub.take()]
    assert told == [(name, Shutdown(checkpoint=True)) for name in ("trainer", "trainer-1")]
    assert [one.gives_way for one in world.fleet.ranks] == [True, False], "its own agent says it"
    world.leaving = ["trainer-1", "trainer"]
    world.check()
    assert world.hub.take() == [], "once is enough"


def test_a_process_that_waited_long_for_an_agent_has_all_its_time_to_start() -> None:
    fleet = World(generators=1).fleet
    limits = fleet.config.model_copy(update={"startup_seconds": 30.0})
    worker, handle = fleet.trainer, fleet.trainer.handle
    worker.is_ready, began = False, worker.heard
    handle.node = None  # type: ignore[misc]
    assert cause_of_death(worker, began + 500, limits) is None
    handle.node = ""  # type: ignore[misc]
    assert cause_of_death(worker, began + 501, limits) is None
    assert "was not ready after 31 s" in str(cause_of_death(worker, began + 532, limits))


def test_the_bound_counts_generators_and_not_their_numbers() -> None:
    async def check() -> None:
        world = World(generators=2)
        fleet = world.fleet
        unused: Any = None
        scaling = Scaling(fleet, unused, unused)
        fleet.leave(fleet.ordered[1])
        with pytest.raises(UserError, match="max_generators allows 2 generators"):
            await scaling.carry_out(ScaleRequest(3))
        effect = await scaling.carry_out(ScaleRequest(2))
        assert effect.text == "generator-2 will join", "generator-1 is still leaving"

    asyncio.run(check())
