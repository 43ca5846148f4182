"""The trainer process: trajectories in, optimizer steps and new weights out.

intake      consumes: deliveries of generators, orders of the controller.
            produces: acknowledgements, whole groups, refusals. (`delivery_check`)
            waits for: generators. bounded by: the scheduler's admission of steps.
commands    consumes: commands of the controller. produces: step plans, the request to end.
            waits for: the controller. bounded by: the number of steps.
training    consumes: whole groups, step plans. produces: gradients, steps, weights, checkpoints.
            waits for: groups of this step, then its plan. unblocked by: intake and commands.
            bounded by: the groups of one step.
saving      consumes: checkpoints that were begun. produces: CheckpointWritten, CheckpointFailed.
            waits for: the disk. bounded by: launcher.checkpoint_seconds; one at a time.
report      consumes: counters. produces: `TrainerReport`.
            waits for: the clock. bounded by: REPORT_SECONDS.

A group's gradient is accumulated as soon as the group is whole (with `trainer.mix_groups`, with all
waiting groups, up to a micro-batch); in a repeatable run, after all groups before it. The optimizer
steps when every group of the step's plan has been accumulated. Trajectories of later steps wait in
the queue. A trajectory that arrives twice is acknowledged twice and kept once.

A trainer of several ranks has a process for each, which receives its own groups. Common actions,
steps and checkpoints, follow from the commands, which all ranks get in the same order: a plan is
executed by all or by none, and a checkpoint is of the step after the last plan before it.
"""

import asyncio
import contextlib
import json
from collections import deque

from asyncrl.config.by_step import ConfigByStep
from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.monitoring.config import set_log_level
from asyncrl.trainer.sharding.lockstep import NextAction
from asyncrl.trainer_process.checkpoints import Checkpoints
from asyncrl.trainer_process.delivery_check import DeliveryNotKept, GroupQueue, Intake
from asyncrl.trainer_process.step_trainer import StepTrainer, TrainerRecords, word_of
from asyncrl.wire import Hub, Line
from asyncrl.wire.errors import WireError
from asyncrl.wire.messages import data, from_trainer, to_trainer
from asyncrl.wire.transport.decoding import FrameRefused, Reason

REPORT_SECONDS = 0.5


class TrainerProcess:
    """The loops of the trainer. Use once: `await process.run()`.

    Args:
        groups_per_step: of a step without failed groups.
        mixed_tokens: waiting groups are added together up to this many tokens; 0: one by one.
        in_order: accumulate groups in the order of their numbers, so that the rounding of their sum
            repeats.
        is_dynamic: the groups of a step depend on their rewards (dynamic sampling), so the next one
            in order is not known before the plan.
        lineage: number of trainers before this one; deliveries for those are not taken.
        stops_on_wrong_policy: do not train a step with tokens of another policy.
    """

    def __init__(
        self,
        steps: StepTrainer,
        queue: GroupQueue,
        intake: Intake,
        checkpoints: Checkpoints,
        control: Line[to_trainer.ToTrainer],
        generators: Hub[data.FromGeneratorData],
        records: TrainerRecords,
        *,
        groups_per_step: int,
        mixed_tokens: int = 0,
        in_order: bool = False,
        is_dynamic: bool = False,
        lineage: int = 0,
        stops_on_wrong_policy: bool = True,
    ) -> None:
        self._steps = steps
        self._queue = queue
        self._intake = intake
        self._checkpoints = checkpoints
        self._control = control
        self._generators = generators
        self._metrics = records.metrics
        self._timeline = records.timeline
        self._groups_per_step = groups_per_step
        self._mixed_tokens = mixed_tokens
        self._in_order = in_order
        self._is_dynamic = is_dynamic
        self._lineage = lineage
        self._stops_on_wrong_policy = stops_on_wrong_policy
        self._plans: dict[int, frozenset[int]] = {}
        self._changed = asyncio.Event()
        self._shutdown: to_trainer.Shutdown | None = None
        self._newest_plan = -1
        self._ordered_checkpoints: deque[int] = deque()
        self._cut_off: list[from_trainer.PeerCutOff] = []
        generators.refusals.on_cut_off = lambda generator, why: self._cut_off.append(
            from_trainer.PeerCutOff(generator, why)
        )

    async def run(self, *, metrics_port: int | None, address: str = "") -> None:
        """Publish the current weights, then train until the shutdown command.

        `address` is how generators reach this process, by default where it listens. Raises
        ExceptionGroup with the error of a loop.
        """
        manifest = await self._steps.publish()
        reached, first = address or self._generators.address, self._steps.learner.initial_weights
        ready = from_trainer.TrainerReady(self._steps.step, manifest, metrics_port, first, reached)
        await self._control.send(ready)
        async with asyncio.TaskGroup() as loops:
            endless = (self._receive_deliveries(), self._receive_commands(), self._report())
            background = [loops.create_task(one) for one in endless]
            sending = loops.create_task(self._send_outcomes())
            await self._train()
            if self._shutdown is not None and self._shutdown.checkpoint:
                await self._save(wanted=True)
            await self._checkpoints.close()
            await sending
            for task in background:
                task.cancel()
        await self._control.send(from_trainer.Goodbye())

    def configure(self, config: RunConfig) -> None:
        """Apply settings that may change while the run trains."""
        set_log_level(config.monitoring.log_level)
        by_step = ConfigByStep(config)
        self._steps.configure(by_step)
        self._checkpoints.configure(by_step)

    async def _receive_deliveries(self) -> None:
        while True:
            peer, delivery = await self._generators.receive()
            if delivery.lineage == self._lineage:
                await self._take_in(peer, delivery)
            else:
                self._queue.duplicates += 1  # for a lost trainer: its tokens follow other policies

    async def _take_in(self, peer: str, delivery: data.TrajectoryDelivery) -> None:
        try:
            kept = self._intake.receive(peer, delivery, next_step=self._steps.step)
        except DeliveryNotKept as error:
            text = str(error)
            self._generators.refusals.refuse(peer, FrameRefused(Reason.TRAJECTORY, text))
            if error.was_ordered:  # the run waits for it, and must learn that it is not coming
                await self._control.send(from_trainer.DeliveryRefused(peer, delivery.sample, text))
            return
        if kept:
            # A generator that has died needs no answer: its replacement sends the sample again.
            self._generators.send_soon(peer, data.Received(delivery.sample, self._lineage))
            self._changed.set()

    async def _receive_commands(self) -> None:
        while True:
            match await self._control.receive():
                case to_trainer.StepPlan(step=step, groups=groups):
                    self._newest_plan = max(self._newest_plan, step)
                    if step >= self._steps.step:
                        self._plans[step] = frozenset(groups)
                case to_trainer.Expect() as order:
                    await self._expect(order)
                case to_trainer.Withdraw(generator=lost):
                    self._intake.withdraw(lost)
                case to_trainer.Configure() as changed:
                    source = "the configuration that the controller sent"
                    self.configure(parse_config(json.loads(changed.config_json), source=source))
                case to_trainer.WriteCheckpoint():
                    self._ordered_checkpoints.append(self._newest_plan)
                case to_trainer.Shutdown() as shutdown:
                    self._shutdown = shutdown
            self._changed.set()

    async def _expect(self, order: to_trainer.Expect) -> None:
        """Take the early deliveries of this order; request those that had no room."""
        wanted = self._intake.expect(order, next_step=self._steps.step)
        for sample in wanted.given_back:
            self._generators.send_soon(order.generator, data.SendAgain(sample, self._lineage))
        for delivery in wanted.here:
            await self._take_in(order.generator, delivery)

    async def _train(self) -> None:
        while True:
            self._changed.clear()
            step = self._steps.step
            plan = self._plans.get(step)
            # Between two groups: the weights are those of a step.
            saves = bool(self._ordered_checkpoints) and step > self._ordered_checkpoints[0]
            is_over = self._is_over()
            if not (is_over or saves):
                allowed = self._allowed(step, plan)
                groups = self._queue.take(step, allowed=allowed, tokens=self._mixed_tokens)
                if groups:
                    await self._steps.accumulate(groups)
                    continue
            done, size = self._steps.done, self._groups_per_step
            word, cause = word_of(step, plan, done, size, is_over=is_over, saves=saves)
            match await self._steps.decide(word, self._changed, cause):
                case NextAction.END:
                    return
                case NextAction.SAVE:
                    self._ordered_checkpoints.popleft()
                    await self._save(wanted=True, ordered=True)
                case NextAction.FINISH:
                    await self._finish_step()

    def _is_over(self) -> bool:
        """Return True if training ends here. Actions that other ranks take come first."""
        ordered = self._steps.step in self._plans or bool(self._ordered_checkpoints)
        return self._shutdown is not None and not (self._steps.world.size > 1 and ordered)

    def _allowed(self, step: int, plan: frozenset[int] | None) -> frozenset[int] | None:
        """Groups that may be accumulated next; None allows any of the step.

        In order, the next group of a step is known before its plan arrives, unless it fails. Then
        the trainer waits for the plan, which has no failed groups.
        """
        if not self._in_order:
            return plan
        done = self._steps.done
        if plan is None and self._is_dynamic:
            return frozenset()
        if plan is None:
            return frozenset({step * self._groups_per_step + len(done)})
        return frozenset(sorted(plan - done)[:1])

    async def _finish_step(self) -> None:
        await self._checkpoints.settle()
        wrong = await self._steps.wrong_policies()
        for found in wrong:
            await self._control.send(found)
        ends = self._stops_on_wrong_policy and not all(found.provisional for found in wrong)
        if await self._steps.meet(ends):
            self._plans.clear()
            self._ordered_checkpoints.clear()
            while self._shutdown is None:  # the controller ends the run; nothing is trained on
                self._changed.clear()
                await self._steps.wait(self._changed, "the run's end")
            return
        self._plans.pop(self._steps.step, None)
        finished = await self._steps.finish_step()
        self._queue.forget_before(self._steps.step)
        self._intake.forget_before(self._steps.step)
        if finished is not None:
            self._checkpoints.finished(finished)
            await self._control.send(finished)
        await self._save(wanted=self._checkpoints.is_due)

    async def _save(self, *, wanted: bool, ordered: bool = False) -> None:
        """Begin a checkpoint of all ranks, if rank 0 wants one and can write it."""
        leads = self._steps.world.leads
        begins = wanted and leads and await self._checkpoints.can_begin(ordered=ordered)
        if await self._steps.decided(begins):
            await self._checkpoints.begin()

    async def _send_outcomes(self) -> None:
        async for outcome in self._checkpoints.outcomes():
            await self._control.send(outcome)

    async def _report(self) -> None:
        while True:
            queued = self._queue.trajectories
            self._metrics.queued.set(queued)
            self._metrics.duplicates.follow(self._queue.duplicates)
            self._timeline.flush()  # so that a long wait is visible while it lasts
            await self._control.send(
                from_trainer.TrainerReport(self._steps.step, queued, self._steps.busy_seconds)
            )
            with contextlib.suppress(OSError, WireError):  # the controller ends the run for it
                self._generators.listen_again()
            while self._cut_off:
                await self._control.send(self._cut_off.pop())
            await asyncio.sleep(REPORT_SECONDS)
