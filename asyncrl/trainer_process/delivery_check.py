"""Decides which deliveries the trainer keeps, and queues them until their group is whole.

    controller ── Expect ──►┐
                            ├─► kept: queued and acknowledged
    generator ─ delivery ──►┘   early: its order has not come; it waits, unacknowledged
                                given back: no room to wait; requested again with its order
                                refused: it is not what was ordered, or what no run orders

An order and its delivery come over different sockets, in any order. So an early delivery is not its
sender's fault, nor is one that was ordered from another, lost generator. No sockets, no clock.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from asyncrl.rewards.values import MAX_FLOAT32
from asyncrl.rollout.trajectory import FloatArray, SampleId, Trajectory
from asyncrl.trainer.base.errors import BatchError
from asyncrl.wire.messages.data import TrajectoryDelivery, decode_trajectory, digest_of
from asyncrl.wire.messages.to_trainer import Expect, ExpectedSample

EARLY_BYTES = 64 << 20
_HEAD_BYTES = 2048
_GIVEN_BACK = 1 << 16
"""Bound of remembered given-back samples. A generator resends one after a while, even unasked."""
_ARRAYS = ("prompt_tokens", "tokens", "behaviour_logprobs", "provenance")


class WholeGroup(NamedTuple):
    """A group with all its samples, in the order of their indices."""

    group: int
    trajectories: list[Trajectory]
    rewards: FloatArray
    generators: list[str]
    terms: list[tuple[float | None, ...]]
    """Results of the reward functions for each sample; empty for a failed reward."""


class _Arrival(NamedTuple):
    generator: str
    delivery: TrajectoryDelivery
    trajectory: Trajectory


class GroupQueue:
    """Groups of `group_size` trajectories. Each whole group is returned once."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.duplicates = 0
        self._partial: dict[int, dict[int, _Arrival]] = {}
        self._whole: dict[int, dict[int, dict[int, _Arrival]]] = {}
        self._taken: dict[int, set[int]] = {}

    @property
    def trajectories(self) -> int:
        """Trajectories held."""
        partial = sum(len(samples) for samples in self._partial.values())
        return partial + self.group_size * sum(len(groups) for groups in self._whole.values())

    def knows(self, sample: SampleId, *, step: int, next_step: int) -> bool:
        """Return True if a sample of this step was queued before, or its step is past."""
        group = sample.group
        return (
            step < next_step
            or group in self._taken.get(step, ())
            or group in self._whole.get(step, ())
            or sample.sample in self._partial.get(group, ())
        )

    def add(
        self, delivery: TrajectoryDelivery, decoded: Trajectory, *, generator: str, next_step: int
    ) -> bool:
        """Queue a delivery; return False if it is a duplicate or its step is before `next_step`.

        Raises ValueError if the sample index is outside the group.
        """
        group, sample = delivery.sample.group, delivery.sample.sample
        if not 0 <= sample < self.group_size:
            raise ValueError(f"sample {sample} is outside a group of {self.group_size}")
        if self.knows(delivery.sample, step=delivery.step, next_step=next_step):
            self.duplicates += 1
            return False
        samples = self._partial.setdefault(group, {})
        samples[sample] = _Arrival(generator, delivery, decoded)
        if len(samples) == self.group_size:
            self._whole.setdefault(delivery.step, {})[group] = self._partial.pop(group)
        return True

    def take(
        self, step: int, *, allowed: Collection[int] | None, tokens: int = 0
    ) -> list[WholeGroup]:
        """Take whole groups of this step until they have this many tokens; at least one if any.

        `allowed` limits the choice.
        """
        taken: list[WholeGroup] = []
        groups = self._whole.get(step, {})
        held = 0
        for group in [one for one in groups if allowed is None or one in allowed]:
            if taken and held >= tokens:
                break
            samples = [one for _, one in sorted(groups.pop(group).items())]
            self._taken.setdefault(step, set()).add(group)
            taken.append(
                WholeGroup(
                    group,
                    [arrival.trajectory for arrival in samples],
                    np.array([arrival.delivery.reward for arrival in samples], np.float32),
                    [arrival.generator for arrival in samples],
                    [arrival.delivery.terms for arrival in samples],
                )
            )
            held += sum(len(one.prompt_tokens) + len(one.tokens) for one in taken[-1].trajectories)
        return taken

    def forget_before(self, step: int) -> None:
        """Drop leftover samples of earlier steps, whose groups failed."""
        for kept in (self._whole, self._taken):
            for old in [key for key in kept if key < step]:
                del kept[old]
        for group, samples in list(self._partial.items()):
            if next(iter(samples.values())).delivery.step < step:
                del self._partial[group]


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
            raise ValueError(f"it is outside a group of {self._queue.group_size} samples")
        if delivery.step >= self._steps:
            raise ValueError(f"it is for step {delivery.step}, but the run has {self._steps} steps")

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


def _bytes_of(delivery: TrajectoryDelivery) -> int:
    return _HEAD_BYTES + sum(len(getattr(delivery, name)) for name in _ARRAYS)
