"""Trains one step after another: gradients of groups, the optimizer step, new weights.

A rank without a group to train on agrees with the others on what to do (`word_of`, `asked`).
"""

import asyncio
import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from asyncrl.config.by_step import ConfigByStep
from asyncrl.errors import AsyncrlError
from asyncrl.monitoring.metrics.metrics import TrainerMetrics
from asyncrl.monitoring.records.spans import SpanKind
from asyncrl.monitoring.records.timeline import Timeline
from asyncrl.monitoring.tracing.tracer import Tracer
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.sharding.lockstep import Lockstep, NextAction, RankStatus, RankWork
from asyncrl.trainer_process.delivery_check import WholeGroup
from asyncrl.trainer_process.policy_check import PolicyCheck
from asyncrl.trainer_process.sample_log import ShownSamples, TrainedSampleLog
from asyncrl.wire.messages.from_trainer import StepFinished, WrongPolicyFound
from asyncrl.wire.records.step import TrainerTimes
from asyncrl.wire.weights.broadcast.sending import WeightSender
from asyncrl.wire.weights.layout import WeightManifest
from asyncrl.wire.weights.writer import WeightPublisher

OTHER_RANKS = "other ranks"
"""Cause of a wait at the end of a step."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
"""Seconds between two questions to ranks that all wait."""


def word_of(
    step: int,
    plan: frozenset[int] | None,
    done: Collection[int],
    groups: int,
    *,
    is_over: bool,
    saves: bool,
) -> tuple[RankStatus, str]:
    """State of a rank without a group to accumulate, and what it waits for.

    `done` groups of the step are accumulated; `groups` is its size while its `plan` is not known.
    `is_over`: the run has ended for the rank. `saves`: it must write a checkpoint now. Raises
    AsyncrlError if the plan lacks an accumulated group.
    """
    if is_over:
        return RankStatus(RankWork.OVER), OTHER_RANKS
    if saves:
        return RankStatus(RankWork.NOTHING, saves=True), OTHER_RANKS
    if plan is None:
        return RankStatus(RankWork.NOTHING), waited_for(len(done), groups)
    if too_many := set(done) - plan:
        raise AsyncrlError(
            f"step {step}: the controller reported groups {sorted(too_many)} as failed "
            "after they had been accumulated; resume the run from its last checkpoint"
        )
    if len(done) == len(plan):
        return RankStatus(RankWork.DONE), OTHER_RANKS
    return RankStatus(RankWork.NOTHING), waited_for(len(done), len(plan))


def waited_for(done: int, groups: int) -> str:
    """Return what a trainer without a whole group waits for, in a step of this many groups.

    `first group`: no group of the step has been trained on. `last group`: one group is missing, so
    this is the wait for the slowest sample. `step plan`: all groups are trained on, and the
    controller has not confirmed that these are all.
    """
    if done >= groups:
        return "step plan"
    if done == 0:
        return "first group"
    return "last group" if done == groups - 1 else "more groups"


async def asked(lockstep: Lockstep, word: RankStatus, changed: asyncio.Event) -> NextAction:
    """Agree with all ranks on the next action; `WAIT` if an event has changed this one's state.

    While all wait, they ask again after pauses that grow to `_LONGEST_PAUSE`. Raises RankLost.
    """
    pause = _FIRST_PAUSE
    while (act := await asyncio.to_thread(lockstep.agree, word)) is NextAction.WAIT:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), pause)
        if changed.is_set():
            break
        pause = min(2 * pause, _LONGEST_PAUSE)
    return act


class RankPart(msgspec.Struct, frozen=True):
    """One rank's part of a step."""

    groups: tuple[int, ...]
    """Groups that it trained on, ascending."""
    samples: int
    terms: tuple[tuple[float, int], ...]
    """The sum of results and the number of scored samples of each reward function."""
    waited_seconds: float
    """Wait for the other ranks, after it had the gradients of all its groups of the step."""
    follows: bool
    """True if no generator of its samples is known to have another policy."""


def sums_of(terms: Sequence[tuple[float | None, ...]]) -> tuple[tuple[float, int], ...]:
    """Return `RankPart.terms`; `terms` has a row for each sample that has a reward."""
    columns = ([one for one in column if one is not None] for column in zip(*terms, strict=True))
    return tuple((math.fsum(values), len(values)) for values in columns)


def mean_terms(parts: Sequence[RankPart]) -> tuple[float | None, ...]:
    """Mean result of each reward function, None if it scored no sample; empty if none did."""
    having = [part.terms for part in parts if part.terms]
    counts = [sum(count for _, count in one) for one in zip(*having, strict=True)]
    totals = [math.fsum(total for total, _ in one) for one in zip(*having, strict=True)]
    return tuple(t / n if n else None for t, n in zip(totals, counts, strict=True))


@dataclass(frozen=True, slots=True)
class TrainerRecords:
    """Sinks of a trainer's records."""

    metrics: TrainerMetrics
    timeline: Timeline
    samples: TrainedSampleLog | None = None
    check: PolicyCheck | None = None
    tracer: Tracer | None = None
    shown: ShownSamples | None = None


class StepTrainer:
    """The learner and its publisher, on the timeline. The learner works in a thread.

    With several ranks, `meet`, `decided` and `finish_step` are collectives. Rank 0 publishes;
    `sender` broadcasts weights, which otherwise are only read. `engine_dtype` is the engines' type;
    `samples_follow_policy` holds until `configure`. Attributes: `learner`, `world`.
    """

    def __init__(
        self,
        learner: Learner,
        publisher: WeightPublisher,
        records: TrainerRecords,
        *,
        engine_dtype: torch.dtype,
        samples_follow_policy: bool,
        sender: WeightSender | None = None,
    ) -> None:
        self.learner = learner
        self.world = learner.world
        self._lockstep = learner.lockstep
        self._sender = sender
        self._publisher = publisher
        self._engine_dtype = engine_dtype
        self._samples_follow_policy: Callable[[int], bool] = lambda _step: samples_follow_policy
        self._records = records
        self._check = records.check
        self._start_step()
        self.busy_seconds = 0.0

    def _start_step(self) -> None:
        self._accumulated: list[int] = []
        self.done: set[int] = set()
        self._samples = 0
        self._terms: list[tuple[float | None, ...]] = []
        self._groups: list[WholeGroup] = []
        self._train_seconds = 0.0
        self._waited: defaultdict[str, float] = defaultdict(float)

    @property
    def step(self) -> int:
        """The step being trained: the number of optimizer steps taken, which is the version."""
        return self.learner.policy_version

    def configure(self, config: ConfigByStep) -> None:
        """Apply settings that change at later steps."""
        self.learner.peak_rates = config.peak_rates
        self._samples_follow_policy = lambda step: config.at(step).samples_follow_policy

    async def publish(self) -> WeightManifest | None:
        """Publish the current weights with their fingerprint; only rank 0 does.

        With sharded weights, the other ranks take part. Raises PublishError or RankLost.
        """
        if not self.world.leads:
            if self._lockstep.is_shared:
                await asyncio.to_thread(self.learner.weights.take_part, self._engine_dtype)
            return None
        with self._records.timeline.span(SpanKind.TRANSFERRING_WEIGHTS, version=self.step):
            return await asyncio.to_thread(self._publish)

    def _publish(self) -> WeightManifest:
        fingerprint = self.learner.fingerprint(self._engine_dtype)
        whole = self.learner.weights.whole if self._lockstep.is_shared else None
        manifest = self._publisher.publish(self.learner.tensors(), self.step, fingerprint, whole)
        return manifest if self._sender is None else self._sender.publish(manifest)

    async def accumulate(self, groups: Sequence[WholeGroup]) -> None:
        """Add the gradients of whole groups. Raises TrainerError."""
        began = time.monotonic()
        with self._records.timeline.span(SpanKind.TRAINING, step=self.step):
            rows = await asyncio.to_thread(
                self.learner.add_groups, [(one.trajectories, one.rewards) for one in groups]
            )
        numbers = tuple(one.group for one in groups)
        self._trace("train", numbers, self.step, began)
        for group, disagreement in zip(groups, rows, strict=True):
            if self._check is not None:
                self._check.add(group, disagreement)
            self._samples += len(group.trajectories)
            self._terms += [terms for terms in group.terms if terms]
        self._accumulated += numbers
        self.done.update(numbers)
        if self._records.samples is not None or self._records.shown is not None:
            self._groups += groups
        self._count_training(time.monotonic() - began)

    async def wait(self, changed: asyncio.Event, cause: str) -> None:
        """Wait for an event; `cause` is shown on the timeline."""
        with self._waiting(cause):
            await changed.wait()

    async def decide(self, word: RankStatus, changed: asyncio.Event, cause: str) -> NextAction:
        """Decide this rank's next action; with sharded weights, that of all. May wait first.

        `changed`: this rank's state has changed (`WAIT`). `cause` is for the timeline. May raise
        RankLost.
        """
        if not self._lockstep.is_shared:
            act = self._lockstep.agree(word)
            if act is NextAction.WAIT:
                await self.wait(changed, cause)
            return act
        with self._waiting(cause):
            act = await asked(self._lockstep, word, changed)
            if act is NextAction.COMPUTE:
                await asyncio.to_thread(self.learner.pad)
        return act

    @contextlib.contextmanager
    def _waiting(self, cause: str) -> Iterator[None]:
        began = time.monotonic()
        with self._records.timeline.waiting(cause, step=self.step):
            yield
        self._waited[cause] += time.monotonic() - began

    async def wrong_policies(self) -> list[WrongPolicyFound]:
        """Generators whose tokens of this step do not follow the current policy."""
        if self._check is None:
            return []
        return await asyncio.to_thread(self._check.findings, self.step)

    async def meet(self, own: bool) -> bool:
        """Wait for all ranks' gradients; return True if `own` is true on any. Raises RankLost."""
        if self.world.size == 1:
            return own
        began = time.monotonic()
        with self._waiting(OTHER_RANKS):
            found = await asyncio.to_thread(self.world.any, own, f"step {self.step}")
        self._records.metrics.rank_wait.observe(time.monotonic() - began)
        return found

    async def decided(self, own: bool) -> bool:
        """Return rank 0's decision about the next action. Raises RankLost."""
        if self.world.size == 1:
            return own
        return await asyncio.to_thread(self.world.decided, own, "what rank 0 decides")

    async def finish_step(self) -> StepFinished | None:
        """Take the optimizer step and publish the new weights; return the result on rank 0.

        Raises TrainerError if the step failed; PublishError if the weights could not be published.
        """
        step, groups = self.step, tuple(sorted(self._accumulated))
        began = time.monotonic()
        with self._records.timeline.span(SpanKind.TRAINING, step=step):
            learned = await asyncio.to_thread(self.learner.step)
        self._trace("optimizer step", groups, step, began)
        follows = self._check is None or self._check.follows
        waited, terms = self._waited[OTHER_RANKS], sums_of(self._terms)
        own = msgspec.msgpack.encode(RankPart(groups, self._samples, terms, waited, follows))
        found = await asyncio.to_thread(self.world.gather, own, "a step's parts")
        parts = [msgspec.msgpack.decode(one, type=RankPart) for one in found]
        follow = self._samples_follow_policy(step) and all(part.follows for part in parts)
        once = learned.learning.optimizer_steps == 1  # later ones see another policy
        on_policy = follow and once and learned.staleness.max == 0
        metrics = msgspec.structs.replace(learned, exactly_on_policy=on_policy)
        self._count_training(time.monotonic() - began)
        if self._records.samples is not None:
            await self._records.samples.record(step, self._groups)
        began = time.monotonic()
        manifest = await self.publish()
        times = TrainerTimes(
            train_seconds=self._train_seconds,
            publish_seconds=time.monotonic() - began,
            wait_seconds=sum(self._waited.values()),
            wait_first_seconds=self._waited["first group"],
            wait_last_seconds=self._waited["last group"],
            # The ranks' mean. All groups arrive before the plan: nothing else is waited for.
            rank_idle_seconds=math.fsum(part.waited_seconds for part in parts) / len(parts),
        )
        finished: StepFinished | None = None
        if manifest is not None:
            groups = tuple(sorted(group for part in parts for group in part.groups))
            chooser, terms_of_all = self._records.shown, mean_terms(parts)
            shown = () if chooser is None else chooser.of(step, self._groups)
            finished = StepFinished(step, groups, manifest, metrics, times, terms_of_all, shown)
            self._measure(finished, samples=sum(part.samples for part in parts))
        self._start_step()
        return finished

    def _trace(self, name: str, groups: tuple[int, ...], step: int, began: float) -> None:
        if self._records.tracer is None:
            return
        now, more = time.monotonic(), {"asyncrl.step": step}
        for group in groups:
            if self._records.tracer.is_traced(group):
                self._records.tracer.of_group(name, group, began, now, more)

    def _count_training(self, seconds: float) -> None:
        self._train_seconds += seconds
        self.busy_seconds += seconds

    def _measure(self, finished: StepFinished, *, samples: int) -> None:
        metrics, manifest = self._records.metrics, finished.manifest
        metrics.publish(finished.metrics)
        metrics.steps.inc()
        metrics.tokens.inc(finished.metrics.batch.tokens)
        metrics.samples.inc(samples)
        metrics.train_time.observe(finished.times.train_seconds)
        metrics.publish_time.observe(finished.times.publish_seconds)
        metrics.weights_size.set(manifest.nbytes)
        metrics.policy_version.set(manifest.policy_version)
