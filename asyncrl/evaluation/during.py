"""Evaluates every n-th policy version during training, on the generators that train.

    version v - lead is published ──► samples of v are dealt to the generators, as run-ahead
    version v is installed        ──► they are verified and finished; each is of v and no other
    the last one comes back       ──► the result; if any is lost for good, the round is abandoned

The lead is 0 without verification. Generators postpone newer versions until their held-out samples
are finished, for `hold_seconds` at most. Nothing else waits for a round.
"""

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.config.by_step import ConfigByStep
from asyncrl.config.run_config import RunConfig
from asyncrl.evaluation.round import EvaluationRound, plan_of
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.fleet.process_state import GeneratorWorker
from asyncrl.scheduler.run_ahead import OWN
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.wire.messages import from_generator, to_generator
from asyncrl.wire.messages.to_generator import FixedVersion
from asyncrl.wire.records.evaluations import EvaluationRecord

Say = Callable[[str], None]


def lead_of(config: RunConfig) -> int:
    """Return how many versions ahead an evaluation begins: as far as training runs ahead."""
    scheduler, groups = config.scheduler, config.scheduler.max_runahead_groups
    if scheduler.on_update != "verify":
        return 0
    return OWN if groups == "auto" else -(-groups // scheduler.groups_per_step)


def next_version(every: int, *, published: int, known: int, steps: int) -> int | None:
    """Return the version to evaluate next, a multiple of `every`; None if there are no more.

    Versions up to `known` are evaluated or abandoned, and the last one, `steps`, follows training.

    >>> next_version(10, published=7, known=0, steps=30)
    10
    >>> next_version(10, published=12, known=10, steps=20) is None
    True
    """
    at_least = max(published, known + 1, 1)
    version = -(-at_least // every) * every
    return version if version < steps else None


@dataclass(slots=True)
class _Round:
    version: int
    samples: EvaluationRound
    fixed: FixedVersion
    held_seconds: float = 0.0
    """The maximum over all generators."""


class EvaluationDuringTraining:
    """Runs one evaluation round at a time; `given_up` is called if there is no result."""

    def __init__(
        self,
        config: RunConfig,
        requests: SampleRequests,
        fleet: Fleet,
        *,
        say: Say,
        result: Callable[[EvaluationRecord], None],
        given_up: Callable[[int], None],
    ) -> None:
        self._config = config
        self._requests = requests
        self._fleet = fleet
        self._say = say
        self._result = result
        self._given_up = given_up
        self._number = _FIRST_NUMBER
        self._published = 0
        self._known = 0
        self._round: _Round | None = None

    @property
    def current(self) -> EvaluationRound | None:
        """The samples of the present round."""
        return None if self._round is None else self._round.samples

    @property
    def version(self) -> int | None:
        """The version being evaluated."""
        return None if self._round is None else self._round.version

    def configure(self, config: RunConfig) -> None:
        """Change the settings, from the next round on."""
        self._config = config

    async def begin(self, published: int, evaluated: int) -> None:
        """Start after the `published` version; `evaluated` is the newest one with a result."""
        self._known = evaluated
        every = self._config.evaluation.every
        if every is not None and published:
            last = published // every * every
            if last > max(evaluated, 0) and last < published:
                self._say(
                    f"the evaluation of step {last} has no result: the run continues at step "
                    f"{published}, and the weights of step {last} are gone"
                )
                self._known = last
        await self.published(published)

    async def published(self, version: int) -> None:
        """The trainer has published a version."""
        self._published = version
        every = self._config.evaluation.every
        if every is None or self._round is not None:
            return
        steps = self._config.run.steps
        following = next_version(every, published=version, known=self._known, steps=steps)
        settings = ConfigByStep(self._config).at(version)
        if following is not None and following - version <= lead_of(settings):
            await self._begin(following, ahead=lead_of(settings) > 0 and following > version)

    async def _begin(self, version: int, *, ahead: bool) -> None:
        held_out = self._requests.held_out
        settings = self._config.evaluation
        plan = plan_of(settings, {name: len(prompts) for name, prompts in held_out.items()})
        workers = [one for one in self._fleet.generators() if not one.is_leaving]
        if not plan.total or not workers:
            return
        self._number += 1
        samples = EvaluationRound(self._number, plan, settings, version)
        self._round = _Round(version, samples, FixedVersion(version, ahead, settings.hold_seconds))
        await self._deal(workers)

    async def _deal(self, workers: list[GeneratorWorker]) -> None:
        one = self._round
        if one is None or not one.samples.waiting:
            return
        fit = [worker for worker in workers if worker.policy_version <= one.version]
        if not fit:
            await self._give_up("all generators have newer weights")
            return
        waiting, slots = one.samples.waiting, sum(worker.slots for worker in fit)
        plan, lineage = one.samples.plan, self._fleet.lineage
        purpose = ("step", one.version, *(("lineage", lineage) if lineage else ()))
        for worker in fit:
            for index in one.samples.deal(worker.name, -(-waiting * worker.slots // slots)):
                name, place = plan.place(index)
                prompt, shown = self._requests.held_out[name][place], plan.shown_of(index)
                request = self._requests.evaluate(
                    one.samples.number, index, prompt, purpose, one.fixed, shown_of=shown
                )
                await self._fleet.send(worker.name, request)

    async def returned(
        self, worker: GeneratorWorker, message: from_generator.EvaluationSample
    ) -> None:
        """A sample came back."""
        one = self._round
        if one is None or one.samples.number != message.round:
            return
        if one.samples.generator_of(message.index) != worker.name:
            return  # counted already, or requested from another since
        if (message.policy_version, message.newest_version) != (one.version, one.version):
            await self._give_up(
                f"{worker.name} drew a sample from versions {message.policy_version} to "
                f"{message.newest_version}, which is a defect"
            )
            return
        one.samples.came_back(message.index, message.reward, message.tokens, message.verdict)
        one.held_seconds = max(one.held_seconds, message.held_seconds)
        if one.samples.complete:
            self._round, self._known = None, one.version
            self._result(one.samples.record(one.version, "during", held_seconds=one.held_seconds))
            await self.published(self._published)

    async def missed(self, message: from_generator.EvaluationMissed) -> None:
        """A generator cannot finish its samples."""
        if self._round is not None and self._round.samples.number == message.round:
            await self._give_up(message.reason)

    async def lost(self, worker: GeneratorWorker) -> None:
        """Reassign the samples of a lost or leaving generator to others with the version."""
        if self._round is None:
            return
        self._round.samples.lost(worker.name)
        others = self._fleet.generators()
        await self._deal([one for one in others if one is not worker and not one.is_leaving])

    def rewound(self, step: int) -> None:
        """Rewind to this step with another trainer; generators drop their held-out samples.

        The next round begins after a new version: until then a generator may have weights that are
        gone.
        """
        if self._round is not None:
            version, self._round = self._round.version, None
            later = "starts again at that step" if version > step else "is given up"
            self._say(f"the evaluation of step {version} {later}: the trainer was lost")
        self._published = self._known = step

    def end(self) -> None:
        """Abandon the round at the end of the run."""
        if self._round is not None:
            self._say(
                f"the evaluation of step {self._round.version} has no result: the run ended with "
                f"{self._round.samples.finished} of {self._round.samples.total} samples"
            )
            self._round = None

    async def _give_up(self, reason: str) -> None:
        one = self._round
        if one is None:
            return
        self._round, self._known = None, one.version
        self._say(f"the evaluation of step {one.version} is given up: {reason}")
        self._given_up(one.version)
        for worker in self._fleet.generators():
            await self._fleet.send(worker.name, to_generator.AbandonEvaluation(one.samples.number))


_FIRST_NUMBER = 1_000_000
"""Rounds before and after training have lower numbers."""
