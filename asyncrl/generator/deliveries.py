"""Delivers held samples to the trainer, and keeps them until it has acknowledged them."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.errors import AsyncrlError
from asyncrl.generator.background import ControllerLine
from asyncrl.generator.lenient_reuse import LenientReuse
from asyncrl.generator.reports import GeneratorRecords
from asyncrl.generator.sample_state import HeldSample
from asyncrl.rewards.calls import Reward
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire import Line
from asyncrl.wire.messages import data, from_generator, to_generator
from asyncrl.wire.messages.data import encode_trajectory

logger = logging.getLogger("asyncrl.generator")

RESEND_SECONDS = 10.0
"""An unacknowledged delivery is resent after this time; then after twice the time."""


class TrainerLines:
    """One connection to each rank of the trainer, by rank."""

    def __init__(self, lines: Sequence[Line[data.ToGeneratorData]]) -> None:
        self._lines = list(lines)
        self._receiving: dict[int, asyncio.Task[data.ToGeneratorData]] = {}

    def to(self, rank: int) -> Line[data.ToGeneratorData]:
        """Return the connection to a rank."""
        return self._lines[rank]

    async def receive(self) -> data.ToGeneratorData:
        """Receive the next message of any rank. Cancelling a call loses no message."""
        if len(self._lines) == 1:
            return await self._lines[0].receive()
        for rank, line in enumerate(self._lines):
            if rank not in self._receiving:
                self._receiving[rank] = asyncio.create_task(line.receive())
        await asyncio.wait(self._receiving.values(), return_when=asyncio.FIRST_COMPLETED)
        rank = next(rank for rank, task in self._receiving.items() if task.done())
        return self._receiving.pop(rank).result()


@dataclass(slots=True)
class _Unacknowledged:
    delivery: data.TrajectoryDelivery
    sent: float
    """Time of the last send, in monotonic seconds; `began` is that of the first."""
    began: float
    rank: int
    times: int = 1
    patience: float = field(default_factory=lambda: RESEND_SECONDS)
    """Seconds until it is resent, doubled each time: messages that are not read take memory."""


@dataclass(eq=False)
class Deliveries:
    """Sends samples to the trainer until each is acknowledged.

    Delivered ones are removed from `_held`; acknowledged and failed ones are reported.
    """

    _held: dict[SampleId, HeldSample]
    _trainer: TrainerLines
    _controller: ControllerLine
    _records: GeneratorRecords
    _lenient_reuse: LenientReuse | None
    newest_step: int = field(default=-1, init=False)
    _unacknowledged: dict[SampleId, _Unacknowledged] = field(default_factory=dict, init=False)
    _ordered: list[to_generator.Deliver] = field(default_factory=list, init=False)
    """Orders that wait for rewards."""
    _lineage: int = field(default=0, init=False)

    @property
    def unrewarded(self) -> tuple[int, int]:
        """First step with samples to be delivered that have no reward yet, and their number."""
        steps = Counter(
            order.step
            for order in self._ordered
            for one in order.samples
            if (held := self._held.get(one)) is not None and not held.reward.done()
        )
        return min(steps.items(), default=(0, 0))

    @property
    def unacknowledged(self) -> int:
        """Number of delivered samples without acknowledgement."""
        return len(self._unacknowledged)

    def discard(self, samples: Sequence[SampleId]) -> None:
        """Stop sending these samples."""
        for sample in samples:
            self._unacknowledged.pop(sample, None)

    def rewind(self, lineage: int) -> None:
        """Forget what was sent to a lost trainer, which another one has replaced."""
        self._lineage, self.newest_step = lineage, -1
        self._unacknowledged.clear()
        if self._records.samples is not None:
            self._records.samples.rewind()

    async def deliver(self, command: to_generator.Deliver) -> None:
        """Send samples of one group once all their rewards are computed.

        If a sample cannot be delivered, the controller leaves its group out of the step. A command
        from before a rewind is dropped, even while it waits for rewards: the sample stays here.
        """
        self._ordered.append(command)
        try:
            ready = await self._rewarded(command)
        finally:
            self._ordered.remove(command)
        for held, reward in ready:
            sample = held.trajectory.id
            # A sample may have been discarded during the wait for the rewards.
            if command.lineage >= self._lineage and self._held.get(sample) is held:
                del self._held[sample]
                held.close()
                self._send(held, reward, command)

    async def _rewarded(self, command: to_generator.Deliver) -> list[tuple[HeldSample, Reward]]:
        """Wait for the rewards; report the first sample that cannot be delivered."""
        ready: list[tuple[HeldSample, Reward]] = []
        for sample in command.samples:
            held = self._held.get(sample)
            try:
                if held is None:
                    raise AsyncrlError("this generator does not hold the sample")
                ready.append((held, await held.reward))
            except AsyncrlError as error:
                if command.lineage >= self._lineage:
                    await self._controller.report_failed_sample(sample, error)
                return []
        return ready

    def _send(self, held: HeldSample, reward: Reward, command: to_generator.Deliver) -> None:
        step, line = command.step, self._trainer.to(command.rank)
        if command.data_address:
            line.move_to(command.data_address)
        value, terms, lineage = reward.value, reward.terms, command.lineage
        delivery = encode_trajectory(
            held.trajectory, reward=value, step=step, terms=terms, lineage=lineage
        )
        now = time.monotonic()
        self._unacknowledged[held.trajectory.id] = _Unacknowledged(delivery, now, now, command.rank)
        self.newest_step = max(self.newest_step, step)
        if self._lenient_reuse is not None:
            self._lenient_reuse.remember(held.trajectory)
        if self._records.samples is not None:
            self._records.samples.consider(held, reward=reward, step=step)
        self._records.metrics.deliveries.inc()
        line.send_soon(delivery)

    async def receive_answers(self) -> None:
        """Report acknowledged samples and resend the others, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESEND_SECONDS):
                    answer = await self._trainer.receive()
                    waiting = self._unacknowledged.get(answer.sample)
                    if waiting is None or waiting.delivery.lineage != answer.lineage:
                        pass  # it is not for this delivery
                    elif isinstance(answer, data.SendAgain):
                        self._send_again(waiting)
                    else:
                        await self._acknowledged(answer.sample, waiting)
            now = time.monotonic()
            for sample, late in self._unacknowledged.items():
                if now - late.sent > late.patience:
                    text = "the trainer did not acknowledge sample %s; sending it again"
                    logger.warning(text, sample)
                    late.patience *= 2
                    self._send_again(late)

    async def _acknowledged(self, sample: SampleId, waiting: _Unacknowledged) -> None:
        del self._unacknowledged[sample]
        if self._records.traces is not None:
            self._records.traces.delivered(
                sample, waiting.began, step=waiting.delivery.step, times=waiting.times
            )
        await self._controller.send(
            from_generator.SampleDelivered(self._controller.generator, sample),
            urgent=not self._unacknowledged,  # a step may wait for it
        )

    def _send_again(self, waiting: _Unacknowledged) -> None:
        waiting.sent = time.monotonic()
        waiting.times += 1
        self._records.metrics.deliveries.inc()
        self._records.metrics.redeliveries.inc()
        self._trainer.to(waiting.rank).send_soon(waiting.delivery)
