"""Decides which deliveries the trainer keeps: ordered ones that match their report.

    controller ── Expect ──►┐
                            ├─► kept: queued and acknowledged
    generator ─ delivery ──►┘   early: its order has not come; it waits, unacknowledged
                                given back: no room to wait; requested again with its order
                                refused: it is not what was ordered, or what no run orders

An order and its delivery come over different sockets, in any order. So an early delivery is not its
sender's fault, nor is one whose order names another generator, which may be lost. No sockets, no
clock.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from asyncrl.rewards.values import MAX_FLOAT32
from asyncrl.rollout.trajectory import SampleId, Trajectory
from asyncrl.trainer.base.errors import BatchError
from asyncrl.trainer_process.group_queue import GroupQueue
from asyncrl.wire.messages.data import TrajectoryDelivery
from asyncrl.wire.messages.frames import decode_trajectory, digest_of
from asyncrl.wire.messages.to_trainer import Expect, ExpectedSample

EARLY_BYTES = 64 << 20
_HEAD_BYTES = 2048
_GIVEN_BACK = 1 << 16
"""Bound of remembered given-back samples. A generator resends one after a while, even unasked."""


class Wanted(NamedTuple):
    """The early samples of an order."""

    here: Sequence[TrajectoryDelivery]
    given_back: Sequence[SampleId]
    """Samples that came early and were not kept: ask their generator to resend them."""


class DeliveryNotKept(Exception):  # noqa: N818 - names the event
    """Refuses a delivery. `was_ordered`: the run waits for this sample of this generator."""

    def __init__(self, text: str, *, was_ordered: bool) -> None:
        super().__init__(text)
        self.was_ordered = was_ordered


class Intake:
    """Compares deliveries with orders and queues those that match.

    `check` raises BatchError for a trajectory that cannot be trained on now; `functions` is the
    number of the run's reward functions; `early_bytes` bounds all early deliveries together.
    """

    def __init__(
        self,
        queue: GroupQueue,
        check: Callable[[Trajectory], None],
        *,
        functions: int,
        steps: int,
        early_bytes: int = EARLY_BYTES,
    ) -> None:
        self._queue = queue
        self._check = check
        self._functions = functions
        self._steps = steps
        self._early_bytes = early_bytes
        self._orders: dict[SampleId, tuple[Expect, ExpectedSample]] = {}
        self._early: defaultdict[str, dict[SampleId, TrajectoryDelivery]] = defaultdict(dict)
        self._held_bytes: dict[str, int] = {}
        self._given_back: OrderedDict[tuple[str, SampleId], int] = OrderedDict()
        self._lost: set[str] = set()
        """Lost generators, whose names are not reused."""

    def expect(self, order: Expect, *, next_step: int) -> Wanted:
        """Note an order, and find its samples that came before it."""
        here: list[TrajectoryDelivery] = []
        again: list[SampleId] = []
        if order.step < next_step:
            return Wanted(here, again)
        for expected in order.samples:
            sample, generator = expected.sample, order.generator
            if not self._queue.knows(sample, step=order.step, next_step=next_step):
                self._orders[sample] = order, expected
            early = self._take_early(generator, sample)
            if early is not None:
                here.append(early)
            elif self._given_back.pop((generator, sample), None) is not None:
                again.append(sample)
        return Wanted(here, again)

    def withdraw(self, generator: str) -> None:
        """Drop the orders and early deliveries of a lost generator."""
        self._lost.add(generator)
        self._drop(lambda name, _step: name == generator)

    def receive(self, generator: str, delivery: TrajectoryDelivery, *, next_step: int) -> bool:
        """Take a delivery; return False if its order is missing, so that it is not acknowledged.

        Raises DeliveryNotKept if it is not what was ordered, or could never be ordered.
        """
        sample, ordered = delivery.sample, self._orders.get(delivery.sample)
        if ordered is None or ordered[0].generator != generator:
            known = self._queue.knows(sample, step=delivery.step, next_step=next_step)
            if known or generator in self._lost:
                self._queue.duplicates += 1
                return True
            self._hold(generator, delivery)
            return False
        order, expected = ordered
        try:
            trajectory = self._compare(delivery, order, expected)
            self._queue.add(delivery, trajectory, generator=generator, next_step=next_step)
        except (ArithmeticError, BatchError, ValueError) as error:
            raise DeliveryNotKept(
                f"sample {sample} of {generator}: {error}", was_ordered=True
            ) from error
        del self._orders[sample]
        return True

    def _hold(self, generator: str, delivery: TrajectoryDelivery) -> None:
        """Keep a delivery until its order comes; give back the newest ones that have no room.

        Those of the generator that holds the most are given back, so that none takes another's
        room. Raises DeliveryNotKept for a delivery that no run orders.
        """
        sample = delivery.sample
        try:
            self._refuse_impossible(delivery)
            self._trainable(delivery)
        except (ArithmeticError, BatchError, ValueError) as error:
            # If it is ordered after all, the run must learn what is wrong with it.
            self._give_back(generator, delivery)
            raise DeliveryNotKept(
                f"sample {sample} of {generator}, which was not ordered: {error}", was_ordered=False
            ) from error
        self._take_early(generator, sample)
        self._given_back.pop((generator, sample), None)
        # Copied out of the frame that it came in, which may be much longer.
        copies = {name: memoryview(bytes(getattr(delivery, name))) for name in _ARRAYS}
        self._early[generator][sample] = replace(delivery, **copies)
        held = self._held_bytes
        held[generator] = held.get(generator, 0) + _bytes_of(delivery)
        while sum(held.values()) > self._early_bytes:
            most = max(held, key=lambda one: held[one])
            newest = next(reversed(self._early[most].values()))
            self._take_early(most, newest.sample)
            self._give_back(most, newest)

    def _give_back(self, generator: str, delivery: TrajectoryDelivery) -> None:
        self._given_back[generator, delivery.sample] = delivery.step
        if len(self._given_back) > _GIVEN_BACK:
            self._given_back.popitem(last=False)

    def _take_early(self, generator: str, sample: SampleId) -> TrajectoryDelivery | None:
        waiting = self._early.get(generator, {})
        delivery = waiting.pop(sample, None)
        if delivery is not None:
            self._held_bytes[generator] -= _bytes_of(delivery)
            if not waiting:
                del self._early[generator], self._held_bytes[generator]
        return delivery

    def forget_before(self, step: int) -> None:
        """Drop orders of failed groups and unordered deliveries of earlier steps."""
        self._drop(lambda _name, of_step: of_step < step)

    def _drop(self, ends: Callable[[str, int], bool]) -> None:
        """Drop what belongs to such a generator and step."""
        for sample, (order, _) in list(self._orders.items()):
            if ends(order.generator, order.step):
                del self._orders[sample]
        for generator, waiting in list(self._early.items()):
            for sample in [one for one, early in waiting.items() if ends(generator, early.step)]:
                self._take_early(generator, sample)
        for key in [key for key, step in self._given_back.items() if ends(key[0], step)]:
            del self._given_back[key]

    def _refuse_impossible(self, delivery: TrajectoryDelivery) -> None:
        group, sample = delivery.sample.group, delivery.sample.sample
        if group < 0 or not 0 <= sample < self._queue.group_size:
            raise ValueError(f"a group of {self._queue.group_size} samples cannot have this one")
        if delivery.step >= self._steps:
            raise ValueError(
                f"it is for step {delivery.step}, but the run has only {self._steps} steps"
            )

    def _compare(
        self, delivery: TrajectoryDelivery, order: Expect, expected: ExpectedSample
    ) -> Trajectory:
        """Return the trajectory of a delivery that matches its order and can be trained on.

        Otherwise raises ValueError, ArithmeticError or BatchError.
        """
        if delivery.step != order.step:
            raise ValueError(f"it is for step {delivery.step}, ordered for step {order.step}")
        trajectory = self._trainable(delivery)
        described = (len(trajectory.tokens), trajectory.oldest_version)
        if described != (expected.length, expected.oldest_version):
            raise ValueError(
                f"it has {described[0]} tokens of versions from {described[1]} on, but was "
                f"reported with {expected.length} from {expected.oldest_version} on"
            )
        if digest_of(delivery) != expected.digest:
            raise ValueError("its contents differ from those that were reported (digest)")
        return trajectory

    def _trainable(self, delivery: TrajectoryDelivery) -> Trajectory:
        """Return the trajectory of a delivery. Raises as `_compare` if it cannot be trained on."""
        for reward in (delivery.reward, *delivery.terms):
            if reward is not None and not abs(reward) <= MAX_FLOAT32:
                raise ValueError(f"its reward {reward} is not finite in float32")
        if len(delivery.terms) not in (0, self._functions):
            raise ValueError(
                f"it has results of {len(delivery.terms)} functions; the run has {self._functions}"
            )
        trajectory = decode_trajectory(delivery)
        self._check(trajectory)
        return trajectory


_ARRAYS = ("prompt_tokens", "tokens", "behaviour_logprobs", "provenance")


def _bytes_of(delivery: TrajectoryDelivery) -> int:
    return _HEAD_BYTES + sum(len(getattr(delivery, name)) for name in _ARRAYS)
