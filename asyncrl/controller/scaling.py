"""`asyncrl scale`: generators that join and leave a run while it trains."""

from __future__ import annotations

from asyncrl.controller.training import Training
from asyncrl.errors import UserError
from asyncrl.evaluation.fleet import FleetEvaluation
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.fleet.process_state import Worker
from asyncrl.scheduler.events import GeneratorLeaves
from asyncrl.steering.user_commands import Effect
from asyncrl.wire.messages.control import ScaleRequest
from asyncrl.wire.messages.to_generator import Shutdown


class Scaling:
    """Brings the number of generators to the one that was ordered.

    Those with the highest indices leave: they get no more work, and what they have moves
    (`scheduler.generator_drain`). A joiner is told to install the newest weights and given work as
    soon as it is ready.
    """

    def __init__(self, fleet: Fleet, training: Training, evaluation: FleetEvaluation) -> None:
        self._fleet = fleet
        self._training = training
        self._evaluation = evaluation
        self.ordered: int | None = None
        """Generators that the user has ordered last; None: there was no order."""

    async def carry_out(self, order: ScaleRequest) -> Effect:
        """Begin to change the number of generators; what happens now, in words.

        Raises:
            UserError: it cannot be changed so; nothing happens.
        """
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
            return f"{_listed(names)} will join"
        self.ordered = order.generators
        leavers = present[order.generators :]
        for worker in leavers:
            await self.leave(worker)
        if leavers:
            return f"{_listed([one.name for one in leavers])} will leave"
        return f"the run has {len(present)} generator(s) already"

    async def leave(self, worker: Worker) -> None:
        """Have a generator leave the run; what it has moves to others."""
        is_ready = worker.is_ready
        self._fleet.leave(worker)
        if not is_ready:
            return
        await self._evaluation.lost(worker)  # others generate its held-out samples
        if self._training.has_begun:
            await self._training.apply(GeneratorLeaves(worker.name))
        else:
            await self._fleet.send(worker.name, Shutdown())


def _listed(names: list[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
