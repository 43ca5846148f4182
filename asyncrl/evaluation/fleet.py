"""Held-out evaluation on the generators of a run."""

from asyncrl.config.run_config import RunConfig
from asyncrl.evaluation.during import EvaluationDuringTraining
from asyncrl.evaluation.results import EvaluationResults
from asyncrl.evaluation.round import EvaluationRound, plan_of
from asyncrl.fleet.condition_wait import ConditionWait
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.fleet.process_state import GeneratorWorker
from asyncrl.tasks.evaluation_config import EvaluationConfig
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.wire.messages.from_generator import EvaluationMissed, EvaluationSample
from asyncrl.wire.records.evaluations import EvaluationRecord


class FleetEvaluation:
    """Runs evaluations before and after training, and forwards events to those during it.

    A round before or after training keeps every generator busy, with the newest weights at its
    start; samples of older weights do not count. `waiter` is what the phase waits on.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        requests: SampleRequests,
        *,
        fleet: Fleet,
        waiter: ConditionWait,
        during: EvaluationDuringTraining,
        results: EvaluationResults,
    ) -> None:
        self._config = config
        self._requests = requests
        self._fleet = fleet
        self._waiter = waiter
        self.during = during
        self.results = results
        self._version = 0
        self._round: EvaluationRound | None = None

    @property
    def current(self) -> EvaluationRound | None:
        """The round in progress."""
        return self.during.current if self._round is None else self._round

    def configure(self, config: RunConfig) -> None:
        """Change the settings, from the next round on."""
        self._config = config.evaluation
        self.results.configure(config.evaluation)
        self.during.configure(config)

    async def measure(self, number: int) -> EvaluationRecord | None:
        """Sample every held-out prompt; None if stopped or abandoned. Raises WaitTimeout."""
        prompts = {name: len(one) for name, one in self._requests.held_out.items()}
        plan = plan_of(self._config, prompts)
        weights = self._fleet.weights
        self._version = 0 if weights is None else weights.policy_version
        self._round = current = EvaluationRound(number, plan, self._config)
        for worker in self._fleet.generators():
            await self.fill(worker)
        await self._waiter.until(
            lambda: current.complete or self._waiter.stop_requested or self._round is None,
            seconds=self._config.timeout_seconds,
            what=lambda: f"evaluation samples ({current.finished} of {plan.total} came back)",
            progress=lambda: current.finished,
        )
        self._round = None
        if not current.complete:
            return None
        return current.record(self._version, "before" if number == 0 else "after")

    async def fill(self, worker: GeneratorWorker) -> None:
        """Request enough samples of the current round to keep this generator busy."""
        current = self._round
        if current is None or worker.policy_version < self._version:
            return
        number, plan = current.number, current.plan
        for index in current.next_for(worker.name, worker.slots * 2):
            name, place = plan.place(index)
            prompt, shown = self._requests.held_out[name][place], plan.shown_of(index)
            request = self._requests.evaluate(number, index, prompt, (number,), shown_of=shown)
            await self._fleet.send(worker.name, request)

    def abandon(self) -> None:
        """End the round in progress without a result, as its policy is gone."""
        self._round = None
        self._waiter.notify()

    async def bring_to(self, version: int) -> None:
        """Install this version on every generator, including those that become ready later."""
        self._version = version
        for worker in self._fleet.generators():
            await self.update(worker)

    async def update(self, worker: GeneratorWorker) -> None:
        """Send a generator the newest weights when its own are too old to be evaluated."""
        if worker.policy_version < self._version:
            self._fleet.install(worker.name, self._version)

    async def returned(self, worker: GeneratorWorker, message: EvaluationSample) -> None:
        """Count a sample, or request it again if its weights are too old."""
        current = self._round
        await self.during.returned(worker, message)
        if current is None or current.number != message.round:
            return
        if current.generator_of(message.index) != worker.name:
            return  # counted already, or requested from another since
        if message.policy_version < self._version:
            current.again(message.index)
        else:
            current.came_back(message.index, message.reward, message.tokens, message.verdict)
        await self.fill(worker)

    async def lost(self, worker: GeneratorWorker) -> None:
        """Request the samples of a dead generator from the others."""
        await self.during.lost(worker)
        if self._round is None:
            return
        self._round.lost(worker.name)
        for other in self._fleet.generators():
            await self.fill(other)

    async def missed(self, worker: GeneratorWorker, message: EvaluationMissed) -> None:
        """A generator cannot finish its samples of a round during training."""
        if not worker.is_leaving:  # others have those of a leaver
            await self.during.missed(message)

    async def published(self, version: int) -> None:
        """The trainer has published a version."""
        await self.during.published(version)

    def rewound(self, step: int) -> None:
        """Rewind to this step with another trainer; the run's records were rewound already."""
        self.results.reload()
        self.during.rewound(step)

    async def training_begins(self, published: int) -> None:
        """Note that the first step is to be trained, under weights of this version."""
        await self.during.begin(published, self.results.newest_step)

    def end(self) -> None:
        """End with the run; say so if that ends an evaluation."""
        self.during.end()
        self.results.close()
