"""Finds dead processes and replaces them, or ends the run."""

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.controller.progress import Progress
from asyncrl.controller.scaling import AgentAutoscaling
from asyncrl.controller.trainer_restarts import TrainerRestarts
from asyncrl.controller.training import Training
from asyncrl.errors import RunFailed
from asyncrl.evaluation.fleet import FleetEvaluation
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.fleet.process_state import GeneratorWorker, TrainerRank, Worker
from asyncrl.scheduler.events import GeneratorLost
from asyncrl.wire.messages import to_trainer


@dataclass(eq=False)
class Watchdog:
    """Replaces dead processes."""

    _fleet: Fleet
    _trainer_restarts: TrainerRestarts
    _training: Training
    _evaluation: FleetEvaluation
    _progress: Progress
    _arrivals: AgentAutoscaling | None = None

    async def check(self) -> bool:
        """Handle the processes that died since the last check, if any; then start missing relays.

        Raises RunFailed if a process cannot be replaced, or no generator is left or starts.
        """
        deaths = self._fleet.deaths(is_held=self._training.is_held)
        lost = first_cause(deaths)
        for worker, reason in deaths:
            self._progress.say(_what_died(worker, reason))
            if not worker.has_left:
                self._progress.died(worker.role, worker.name)
            if isinstance(worker, GeneratorWorker):
                await self._generator_lost(worker, reason)
            elif lost is not None and worker is lost[0]:
                await self._trainer_restarts.replace(*lost)
        for worker in self._fleet.without_room():
            others = len(self._fleet.generators())
            self._progress.say(
                f"{worker.name} waits for room on the cluster; the run continues with {others} "
                "generator(s), and it joins when a node has room"
            )
        if self._arrivals is not None:
            await self._arrivals.check()
        for sentence in self._fleet.start_relays():
            self._progress.say(sentence)
        self._fleet.look_after_weights()
        self._fleet.files.update(self._fleet.everyone())
        return bool(deaths)

    async def _generator_lost(self, worker: GeneratorWorker, reason: str) -> None:
        if worker.was_overdue and not self._training.verifies:
            self._progress.say(
                f"of what {worker.name} had begun, short responses are trained on rather than "
                "long ones, which it could not finish; a longer launcher.leave_seconds would "
                "have avoided this bias (docs/deploy.md)"
            )
        self._fleet.installations.drop(worker.name)
        if self._fleet.trainer.state == "ready":  # before the orders that replace it
            await self._fleet.send_trainer(to_trainer.Withdraw(worker.name))
        await self._evaluation.lost(worker)
        await self._training.apply(GeneratorLost(worker.name))
        if worker.is_leaving:
            self._fleet.give_room_back(worker)
            return
        if self._no_generator_starts():
            raise RunFailed(
                f"{worker.name} {reason}; no generator has become ready so far, and so none is "
                f"restarted; the end of its log:\n{worker.handle.log_tail()}"
            )
        self._replace(worker, reason)

    def _no_generator_starts(self) -> bool:
        ever = list(self._fleet.every_generator)
        codes = [worker.handle.exit_code() for worker in ever if worker.is_gone]
        failed = sum(code is not None and code >= 0 for code in codes)
        was_ready = any(worker.is_ready for worker in ever)
        return not was_ready and failed >= self._fleet.config.generators

    def _replace(self, worker: GeneratorWorker, reason: str) -> None:
        if worker.waits_for_room and not self._fleet.has_generators:
            raise RunFailed(f"{worker.name} {reason}, and no other generator is left")
        lost_with_agent = self._arrivals is not None and worker.handle.lost_with_machine
        if lost_with_agent and self._fleet.has_generators:
            count = len(self._fleet.ordered)
            self._progress.say(
                f"the run continues with {count} generator(s); one joins when an agent comes"
            )
            return
        name = self._fleet.restart(worker)
        if name is not None:
            self._progress.say(f"started {name} in place of {worker.name}")
        elif not self._fleet.has_generators:
            raise RunFailed(
                f"{worker.name} {reason}, no generator is left and launcher.max_restarts "
                f"({self._fleet.config.max_restarts}) does not allow another; the end of its log:\n"
                f"{worker.handle.log_tail()}"
            )


def first_cause(deaths: Sequence[tuple[Worker, str]]) -> tuple[TrainerRank, str] | None:
    """Return the trainer rank that probably died first, and how.

    A rank that has lost another exits on its own. One that was killed, perhaps for memory, did not.
    """
    ranks = [(one, reason) for one, reason in deaths if isinstance(one, TrainerRank)]
    killed = [death for death in ranks if (death[0].handle.exit_code() or 0) < 0]
    return next(iter(killed or ranks), None)


def _what_died(worker: Worker, reason: str) -> str:
    """Describe what died and why, with the end of its log without lines that the reason quotes."""
    if worker.has_left:
        return f"{worker.name} {reason}"
    quoted = set(reason.splitlines())
    lines = [line for line in worker.handle.log_tail().splitlines() if line not in quoted]
    return "\n".join([f"{worker.name} {reason}", *lines])
