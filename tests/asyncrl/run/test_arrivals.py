"""Agents that come and go: what is asked of their processes, without agents."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fake_processes import run_config, started_fleet

from asyncrl.errors import UserError
from asyncrl.run.arrivals import Arrivals
from asyncrl.run.scaling import Scaling
from asyncrl.run.worker import Worker
from wire.messages.control import ScaleRequest

AGENTS = {"key_file": "k", "max_generators": 2}


class World:
    """A trainer and generators on agents, some of which are to end."""

    def __init__(self, generators: int) -> None:
        launcher = {"kind": "agents", "generators": generators, "agents": AGENTS}
        self.fleet, self.hub = started_fleet(run_config(launcher=launcher))
        self.left: list[str] = []
        self.leaving: list[str] = []
        self.closed: str | None = None
        self.free = 0
        roster = SimpleNamespace(leaving=lambda: self.leaving, offered=lambda: self.free)
        scaling = SimpleNamespace(leave=self._leave, ordered=None)
        agents: Any = SimpleNamespace(roster=roster)
        told: Any = scaling
        self.arrivals = Arrivals(
            agents, self.fleet, told, why_closed=lambda: self.closed, say=lambda _: None
        )

    async def _leave(self, worker: Worker) -> None:
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
