"""Decides which deliveries the trainer keeps: those that were ordered, as they were reported.

    controller ── Expect ──►┐
                            ├─► kept: queued and acknowledged
    generator ─ delivery ──►┘   early: nobody ordered it yet; it waits, unacknowledged
                                refused: it is not what was ordered

An order and its delivery come over different sockets, so either may be first. What nobody orders
within EARLY_SECONDS is refused. No sockets, no clock of its own.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator

from asyncrl.processes.trainer.group_queue import GroupQueue
from asyncrl.rewards.values import MAX_FLOAT32
from rollout.trajectory import SampleId, Trajectory
from trainer.errors import BatchError
from wire.frames import decode_trajectory, digest_of
from wire.messages.data import TrajectoryDelivery
from wire.messages.to_trainer import Expect, ExpectedSample

EARLY_SECONDS = 5.0
"""How long a delivery may wait for its order. Generators send again after twice this time."""

Delivered = tuple[str, TrajectoryDelivery]
"""A delivery and the generator that sent it."""


class DeliveryNotKept(Exception):  # noqa: N818 - says what happened
    """A delivery is refused.

    Args:
        text: what is wrong with it.
        was_ordered: whether the run waits for this sample of this generator.
    """

    def __init__(self, text: str, *, was_ordered: bool) -> None:
        super().__init__(text)
        self.was_ordered = was_ordered


class Intake:
    """Compares deliveries with orders and queues those that agree.

    Args:
        queue: gets what is kept.
        check: raises BatchError for a trajectory that cannot be trained on now.
        max_early: deliveries of each generator that may wait for their orders.
        functions: reward functions of the run.
    """

    def __init__(
        self,
        queue: GroupQueue,
        check: Callable[[Trajectory], None],
        *,
        max_early: int,
        functions: int,
    ) -> None:
        self._queue = queue
        self._check = check
        self.max_early = max_early
        self._functions = functions
        self._orders: dict[SampleId, tuple[Expect, ExpectedSample]] = {}
        self._early: defaultdict[str, OrderedDict[SampleId, tuple[TrajectoryDelivery, float]]]
        self._early = defaultdict(OrderedDict)

    def expect(self, order: Expect, *, next_step: int) -> Iterator[Delivered]:
        """Note an order; yields its samples that are here already, to be given to `receive`."""
        if order.step < next_step:
            return
        for expected in order.samples:
            if not self._queue.knows(expected.sample, step=order.step, next_step=next_step):
                self._orders[expected.sample] = order, expected
            early = self._early[order.generator].pop(expected.sample, None)
            if early is not None:
                yield order.generator, early[0]

    def receive(
        self, generator: str, delivery: TrajectoryDelivery, *, next_step: int, now: float
    ) -> bool:
        """Take a delivery in; False if it waits for its order and must not be acknowledged yet.

        Raises:
            DeliveryNotKept: it is not what was ordered.
        """
        ordered = self._orders.get(delivery.sample)
        if ordered is None:
            if self._queue.knows(delivery.sample, step=delivery.step, next_step=next_step):
                self._queue.duplicates += 1
                return True
            early = self._early[generator]
            early[delivery.sample] = delivery, now
            early.move_to_end(delivery.sample)
            if len(early) > self.max_early:
                sample, _ = early.popitem(last=False)
                raise _not_ordered(sample, generator)
            return False
        order, expected = ordered
        if order.generator != generator:
            raise DeliveryNotKept(
                f"sample {delivery.sample} was ordered from {order.generator}, not {generator}",
                was_ordered=False,
            )
        try:
            trajectory = self._compare(delivery, order, expected)
            self._queue.add(delivery, trajectory, generator=generator, next_step=next_step)
        except (ArithmeticError, BatchError, ValueError) as error:
            raise DeliveryNotKept(
                f"sample {delivery.sample} of {generator}: {error}", was_ordered=True
            ) from error
        del self._orders[delivery.sample]
        return True

    def overdue(self, now: float) -> Iterator[tuple[str, DeliveryNotKept]]:
        """Drop deliveries that nobody ordered in time; yields who sent each, and why not kept."""
        for sender, early in self._early.items():
            while early:
                sample, (_, arrived) = next(iter(early.items()))
                if now - arrived < EARLY_SECONDS:
                    break
                del early[sample]
                yield sender, _not_ordered(sample, sender)

    def forget_before(self, step: int) -> None:
        """Drop the orders of earlier steps: of samples whose groups failed."""
        for sample, (order, _) in list(self._orders.items()):
            if order.step < step:
                del self._orders[sample]

    def _compare(
        self, delivery: TrajectoryDelivery, order: Expect, expected: ExpectedSample
    ) -> Trajectory:
        """The trajectory of a delivery that is what was ordered, and trainable.

        Raises:
            ValueError, ArithmeticError, BatchError: it is not.
        """
        if delivery.step != order.step:
            raise ValueError(f"it is for step {delivery.step}, ordered for step {order.step}")
        for reward in (delivery.reward, *delivery.terms):
            if not abs(reward) <= MAX_FLOAT32:
                raise ValueError(f"its reward {reward} is not finite in float32")
        if len(delivery.terms) not in (0, self._functions):
            raise ValueError(f"it has rewards of {len(delivery.terms)} functions")
        trajectory = decode_trajectory(delivery)
        self._check(trajectory)
        described = (len(trajectory.tokens), trajectory.oldest_version)
        if described != (expected.length, expected.oldest_version):
            raise ValueError(
                f"it has {described[0]} tokens of versions from {described[1]} on, but was "
                f"reported with {expected.length} from {expected.oldest_version} on"
            )
        if digest_of(delivery) != expected.digest:
            raise ValueError("its contents differ from those that were reported (digest)")
        return trajectory


def _not_ordered(sample: SampleId, generator: str) -> DeliveryNotKept:
    return DeliveryNotKept(
        f"sample {sample} was not ordered from {generator} within {EARLY_SECONDS:.0f} s",
        was_ordered=False,
    )
