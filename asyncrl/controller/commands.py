"""Executes the scheduler's commands: each becomes messages to the processes."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from asyncrl.config.by_step import ConfigByStep
from asyncrl.controller.progress import Progress
from asyncrl.controller.unfinished_work import SampleHandover
from asyncrl.fleet.process_fleet import Fleet
from asyncrl.rollout.trajectory import SampleId
from asyncrl.scheduler import commands
from asyncrl.tasks.sample_requests import SampleRequests
from asyncrl.wire.messages import to_generator, to_trainer
from asyncrl.wire.messages.from_generator import SampleFinished, SampleRewarded
from asyncrl.wire.messages.to_trainer import Expect, ExpectedSample


class SampleReports:
    """Remembers the last report of each sample in flight, by generator.

    The trainer accepts only samples with such a report. They are kept until their step is trained.
    """

    def __init__(self) -> None:
        self._groups: dict[int, dict[tuple[str, SampleId], ExpectedSample]] = {}

    def add(self, generator: str, report: SampleFinished) -> None:
        """Replace an earlier report of the same sample and generator."""
        sample, version = report.sample, report.oldest_version
        expected = ExpectedSample(sample, report.length, version, report.digest)
        self._groups.setdefault(sample.group, {})[generator, sample] = expected

    def drop(self, generator: str, sample: SampleId) -> None:
        """Forget a report that was refused."""
        group = self._groups.get(sample.group, {})
        group.pop((generator, sample), None)
        if not group:
            self._groups.pop(sample.group, None)

    def is_about_last_report(self, generator: str, reward: SampleRewarded) -> bool:
        """Return True if a reward is for the contents that the generator reported last."""
        reported = self._groups.get(reward.sample.group, {}).get((generator, reward.sample))
        return reported is not None and reported.digest == reward.digest

    def expectation(self, step: int, generator: str, samples: Sequence[SampleId]) -> Expect:
        """Return what the trainer should accept. Raises KeyError for an unreported sample."""
        reported = tuple(self._groups[sample.group][generator, sample] for sample in samples)
        return Expect(step, generator, reported)

    def forget_before(self, group: int) -> None:
        """Forget the groups before this one. O(groups in flight)."""
        for old in [index for index in self._groups if index < group]:
            del self._groups[old]


class RankAssignments:
    """Assigns groups to ranks. A group stays with its rank until its trainer is lost.

    Each group, as it comes, goes to the rank with the fewest response tokens of its step so far.
    """

    def __init__(self, ranks: int) -> None:
        self._count = ranks
        self._ranks: dict[int, dict[int, int]] = {}
        self._tokens: dict[int, list[int]] = {}
        self._lineage = 0

    def rank_of(self, group: int, *, step: int, tokens: int, lineage: int = 0) -> int:
        """Return the rank of `lineage`'s trainer that a group's samples go to."""
        if self._count == 1:
            return 0
        if lineage != self._lineage:
            self._ranks.clear()
            self._tokens.clear()
            self._lineage = lineage
        given = self._tokens.setdefault(step, [0] * self._count)
        ranks = self._ranks.setdefault(step, {})
        rank = ranks.setdefault(group, given.index(min(given)))
        given[rank] += tokens
        return rank

    def by_rank(self, step: int, groups: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the groups of a step whose membership is final, by rank; forget earlier steps."""
        if self._count == 1:
            return [tuple(groups)]
        for kept in (self._ranks, self._tokens):
            for old in [key for key in kept if key < step]:
                del kept[old]
        ranks = self._ranks.get(step, {})
        return [
            tuple(one for one in groups if ranks.get(one, 0) == rank) for rank in range(self._count)
        ]


@dataclass(eq=False)
class CommandExecutor:
    """Sends the messages that a scheduler command stands for."""

    _requests: SampleRequests
    _reports: SampleReports
    _fleet: Fleet
    _progress: Progress
    _moves: SampleHandover
    config: ConfigByStep
    _step_of: Callable[[int], int]
    lineage: int = field(default=0, init=False)
    finished: commands.FinishRun | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._deals = RankAssignments(self.config.whole.trainer.ranks)
        fleet, progress, moves = self._fleet, self._progress, self._moves
        self._handlers: dict[type, Callable[[Any], Awaitable[None] | None]] = {
            commands.StartSample: self._start_sample,
            commands.VerifySamples: lambda one: fleet.send(one.generator, self._verification(one)),
            commands.InstallWeights: self._install_weights,
            commands.RewindGenerator: self._rewind_generator,
            commands.ReleaseSamples: lambda one: fleet.send(
                one.generator, moves.request(one, fleet.trainer.policy_version)
            ),
            commands.EndGenerator: lambda one: fleet.send(one.generator, to_generator.Shutdown()),
            commands.DeliverGroup: self._deliver_group,
            commands.DeclareStep: self._declare_step,
            commands.DiscardSamples: lambda one: fleet.send(
                one.generator, to_generator.Discard(one.samples)
            ),
            commands.ReportGroupFailed: lambda one: progress.group_failed(one.group, one.reason),
            commands.ReportGroupWithoutSignal: lambda one: progress.group_without_signal(
                one.group, one.reward
            ),
            commands.PauseGenerator: lambda one: fleet.send(one.generator, to_generator.Pause()),
            commands.ResumeGenerator: lambda one: fleet.send(one.generator, to_generator.Resume()),
            commands.FinishRun: self._finish_run,
        }

    async def execute(self, command: commands.Command) -> None:
        """Execute a command of the scheduler."""
        if (sending := self._handlers[type(command)](command)) is not None:
            await sending

    async def _start_sample(self, command: commands.StartSample) -> None:
        request = self._requests.generate(command.sample, command.priority)
        settings = self.config.at(self._step_of(command.sample.group)).scheduler
        if settings.sample_deadline_seconds is not None:
            request = replace(request, deadline_seconds=settings.sample_deadline_seconds)
        await self._fleet.send(command.generator, request)

    def _verification(self, command: commands.VerifySamples) -> to_generator.Verify:
        return self._requests.verify(command.samples, command.min_version, lineage=self.lineage)

    def _install_weights(self, command: commands.InstallWeights) -> None:
        version = command.policy_version
        rebuild_kv = self.config.at(version).scheduler.on_update == "recompute"
        verify = tuple(self._verification(one) for one in command.verify)
        # A newer version may be installed: the named one may be overwritten already.
        self._fleet.install(command.generator, version, rebuild_kv=rebuild_kv, verify=verify)

    async def _rewind_generator(self, command: commands.RewindGenerator) -> None:
        self._fleet.installations.drop(command.generator)  # the answer to this one counts
        message = to_generator.Rewind(command.policy_version, command.lineage)
        await self._fleet.send(command.generator, message)

    async def _deliver_group(self, command: commands.DeliverGroup) -> None:
        by_generator: dict[str, list[SampleId]] = {}
        for generator, sample in command.samples:
            by_generator.setdefault(generator, []).append(sample)
        orders = {
            generator: self._reports.expectation(command.step, generator, samples)
            for generator, samples in by_generator.items()
        }
        group, step, lineage = command.group, command.step, self.lineage
        tokens = sum(one.length for order in orders.values() for one in order.samples)
        rank = self._deals.rank_of(group, step=step, tokens=tokens, lineage=lineage)
        trainer = self._fleet.ranks[rank]
        for generator, order in orders.items():
            await self._fleet.send(trainer.name, order)
            samples = tuple(by_generator[generator])
            address = trainer.data_address
            message = to_generator.Deliver(step, samples, lineage, address, rank)
            await self._fleet.send(generator, message)

    async def _declare_step(self, command: commands.DeclareStep) -> None:
        dealt = self._deals.by_rank(command.step, command.groups)
        for worker, groups in zip(self._fleet.ranks, dealt, strict=True):
            await self._fleet.send(worker.name, to_trainer.StepPlan(command.step, groups))

    def _finish_run(self, command: commands.FinishRun) -> None:
        self.finished = command
