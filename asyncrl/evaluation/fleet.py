"""Held-out evaluation on the generators of a run."""

from __future__ import annotations

from asyncrl.config import EvaluationConfig
from asyncrl.evaluation.round import Accuracy, EvaluationRound
from asyncrl.run.fleet import Fleet
from asyncrl.run.sample_requests import SampleRequests
from asyncrl.run.waiting import Waiter
from asyncrl.run.worker import Worker
from wire.messages.from_generator import EvaluationSample


class FleetEvaluation:
    """Runs evaluation rounds, one at a time, and keeps every generator busy during a round.

    A round evaluates the newest weights at its start. Samples of older weights do not count.
    """

    def __init__(
        self, config: EvaluationConfig, requests: SampleRequests, *, fleet: Fleet, waiter: Waiter
    ) -> None:
        self._config = config
        self._requests = requests
        self._fleet = fleet
        self._waiter = waiter
        self._version = 0
        """The policy version that is evaluated."""
        self.current: EvaluationRound | None = None
        """The round in progress."""

    def configure(self, config: EvaluationConfig) -> None:
        """Have another time limit, from the next round on."""
        self._config = config

    async def measure(self, number: int) -> Accuracy | None:
        """Sample every held-out prompt; None if it was not finished.

        The user may stop the run before its end, or it is abandoned.

        Raises:
            WaitTimeout: no sample came back for `evaluation.timeout_seconds`.
        """
        prompts = min(self._config.prompts, self._requests.evaluation_prompts)
        total = prompts * self._config.samples
        weights = self._fleet.weights
        self._version = 0 if weights is None else weights.policy_version
        self.current = current = EvaluationRound(number, total, threshold=self._config.threshold)
        for worker in self._fleet.generators():
            await self.fill(worker)
        await self._waiter.until(
            lambda: current.complete or self._waiter.stop_requested or self.current is None,
            seconds=self._config.timeout_seconds,
            what=lambda: f"evaluation samples ({current.finished} of {total} came back)",
            progress=lambda: current.finished,
        )
        self.current = None
        return current.accuracy() if current.complete else None

    async def fill(self, worker: Worker) -> None:
        """Request as many samples of the current round as keep this generator busy."""
        current = self.current
        if current is None or worker.policy_version < self._version:
            return
        for index in current.next_for(worker.name, worker.slots * 2):
            request = self._requests.evaluate(
                current.number, index, prompt=index // self._config.samples
            )
            await self._fleet.send(worker.name, request)

    def abandon(self) -> None:
        """End the round in progress without a result, as its policy is gone."""
        self.current = None
        self._waiter.notify()

    async def bring_to(self, version: int) -> None:
        """Have every generator install this version, also those that become ready later."""
        self._version = version
        for worker in self._fleet.generators():
            await self.update(worker)

    async def update(self, worker: Worker) -> None:
        """Send a generator the newest weights when its own are too old to be evaluated."""
        if worker.policy_version < self._version:
            self._fleet.install(worker.name, self._version)

    async def returned(self, worker: Worker, message: EvaluationSample) -> None:
        """A sample came back: count it, or request it again if its weights are too old."""
        current = self.current
        if current is None or current.number != message.round:
            return
        if current.generator_of(message.index) != worker.name:
            return  # counted already, or requested from another since
        if message.policy_version < self._version:
            current.again(message.index)
        else:
            current.came_back(message.index, message.reward)
        await self.fill(worker)

    async def lost(self, worker: Worker) -> None:
        """A generator died: request its samples from the others."""
        if self.current is None:
            return
        self.current.lost(worker.name)
        for other in self._fleet.generators():
            await self.fill(other)
