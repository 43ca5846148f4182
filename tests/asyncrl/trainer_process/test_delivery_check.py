"""The trainer's intake: it keeps what was ordered, as it was reported, and nothing else."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
from deliveries_of import delivery_of, order_of
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollout.trajectory import SampleId, Segment
from asyncrl.trainer.learner import check_trajectory
from asyncrl.trainer_process.delivery_check import (
    EARLY_BYTES,
    DeliveryNotKept,
    GroupQueue,
    Intake,
    _bytes_of,
)
from asyncrl.wire.messages.data import TrajectoryDelivery
from asyncrl.wire.messages.to_trainer import Expect

ORDERED = delivery_of(SampleId(0, 1))


class Trainer:
    """An intake of groups of two, at version 0, in a run of 3 steps."""

    def __init__(self, early_bytes: int = EARLY_BYTES) -> None:
        self.queue = GroupQueue(2)
        self.intake = Intake(
            self.queue,
            lambda one: check_trajectory(one, 100, 0),
            functions=2,
            steps=3,
            early_bytes=early_bytes,
        )

    def order(self, order: Expect) -> list[TrajectoryDelivery]:
        return list(self.intake.expect(order, next_step=0).here)

    def receive(self, delivery: TrajectoryDelivery, generator: str = "g") -> bool:
        return self.intake.receive(generator, delivery, next_step=0)

    def early(self) -> set[tuple[str, SampleId]]:
        return {(who, sample) for who, held in self.intake._early.items() for sample in held}


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def test_what_was_ordered_is_kept_once_and_acknowledged_each_time() -> None:
    trainer = Trainer()
    assert trainer.order(order_of("g", ORDERED)) == []
    assert trainer.receive(ORDERED)
    assert trainer.receive(ORDERED), "sent again: its acknowledgement was lost"
    assert trainer.order(order_of("h", ORDERED)) == [], "its generator was lost with it"
    assert trainer.receive(ORDERED, "h")
    assert (trainer.queue.trajectories, trainer.queue.duplicates) == (1, 2)


def test_a_delivery_may_come_before_its_order() -> None:
    trainer = Trainer()
    assert not trainer.receive(ORDERED), "not acknowledged"
    assert trainer.queue.trajectories == 0
    assert trainer.order(order_of("g", ORDERED)) == [ORDERED]
    assert trainer.receive(ORDERED)
    assert trainer.queue.trajectories == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reward": float("nan")}, "reward nan is not finite in float32"),
        ({"reward": 1e39}, "not finite in float32"),
        ({"terms": (1.0, 1e39)}, "not finite in float32"),
        ({"terms": (1.0,)}, "results of 1 functions"),
        ({"step": 1}, "for step 1, ordered for step 0"),
        ({"step": -1}, "for step -1, ordered for step 0"),
        ({"tokens": ints(3, 4, 5)}, r"differ from those that were reported \(digest\)"),
        ({"behaviour_logprobs": floats(0, 0, -1)}, "digest"),
        ({"prompt_id": "another"}, "digest"),
        ({"prompt_tokens": ints(9)}, "digest"),
        ({"provenance": b"\0\0\1"}, "digest"),
        ({"finish_reason": "length"}, "digest"),
        ({"tokens": ints(3, 4, 100)}, r"token ids must lie in \[0, 100\)"),
        ({"tokens": ints(3, 4, -1)}, r"token ids must lie in \[0, 100\)"),
        ({"behaviour_logprobs": floats(0, 0, float("nan"))}, "not finite"),
        ({"behaviour_logprobs": floats(0, 0, 0.5)}, "0.5 is above 0"),
        ({"provenance": b"\0\0\4"}, "4 is not a valid Provenance"),
        ({"provenance": b"\0"}, "has 3 tokens, but"),
        ({"segments": (Segment(1, 0, 3),)}, "drawn under version 1, but the trainer is at 0"),
        ({"segments": (Segment(0, 0, 1), Segment(0, 2, 3))}, "after token 1 of version 0 comes"),
        ({"segments": (Segment(0, 0, 2), Segment(-1, 2, 3))}, "versions that do not fall"),
        ({"segments": (Segment(-1, 0, 3),)}, "reported with 3 from 0 on"),
    ],
)
def test_what_is_not_as_reported_is_refused_and_the_run_hears_of_it(
    changes: dict[str, Any], reason: str
) -> None:
    trainer = Trainer()
    trainer.order(order_of("g", ORDERED))
    with pytest.raises(DeliveryNotKept, match=reason) as refused:
        trainer.receive(msgspec.structs.replace(ORDERED, **changes))
    assert refused.value.was_ordered
    assert trainer.queue.trajectories == 0
    assert trainer.receive(ORDERED), "what was ordered is still accepted"


def test_what_another_generator_delivers_is_not_kept() -> None:
    trainer = Trainer()
    trainer.order(order_of("g", ORDERED))
    assert not trainer.receive(ORDERED, "thief"), "not acknowledged"
    assert trainer.queue.trajectories == 0
    assert trainer.receive(ORDERED), "the run still waits for the one that was ordered"
    assert trainer.queue.trajectories == 1


def test_a_successors_delivery_waits_for_its_order_though_the_lost_ones_is_here() -> None:
    trainer = Trainer()
    trainer.order(order_of("g", ORDERED))
    drawn_again = msgspec.structs.replace(ORDERED, tokens=ints(3, 5, 1))
    assert not trainer.receive(drawn_again, "g.1")
    assert trainer.order(order_of("g.1", drawn_again)) == [drawn_again]
    assert trainer.receive(drawn_again, "g.1")
    assert trainer.queue.trajectories == 1


def test_orders_of_a_lost_generator_are_withdrawn() -> None:
    trainer = Trainer()
    other = delivery_of(SampleId(0, 0))
    trainer.order(order_of("g", ORDERED))
    trainer.order(order_of("h", other))
    trainer.receive(delivery_of(SampleId(1, 0)))
    trainer.intake.withdraw("g")
    assert not trainer.early()
    assert trainer.receive(ORDERED), "it may forget it"
    assert trainer.queue.trajectories == 0, "and it is not trained on"
    assert trainer.receive(other, "h"), "others' orders stay"
    assert trainer.queue.trajectories == 1


def test_any_number_of_deliveries_before_their_orders_is_kept_once_these_come() -> None:
    trainer = Trainer()
    deliveries = [delivery_of(SampleId(group, one)) for group in range(40) for one in range(2)]
    for delivery in deliveries:
        assert not trainer.receive(delivery)
        assert not trainer.receive(delivery), "sent again while it waits"
    waited = trainer.order(order_of("g", *deliveries))
    assert waited == deliveries
    assert all(trainer.receive(delivery) for delivery in waited)
    assert trainer.queue.trajectories == len(deliveries)
    assert not trainer.early()
    assert not trainer.intake._held_bytes


def test_what_has_no_room_is_given_back_and_asked_for_with_its_order() -> None:
    room = 2 * _bytes_of(ORDERED)
    trainer = Trainer(early_bytes=room)
    deliveries = [delivery_of(SampleId(group, 1)) for group in range(4)]
    for delivery in deliveries:
        assert not trainer.receive(delivery)
        assert sum(trainer.intake._held_bytes.values()) <= room
    wanted = trainer.intake.expect(order_of("g", *deliveries), next_step=0)
    assert [*wanted.here] == deliveries[:2]
    assert [*wanted.given_back] == [one.sample for one in deliveries[2:]]
    assert all(trainer.receive(delivery) for delivery in deliveries)
    again = trainer.intake.expect(order_of("g", *deliveries), next_step=0)
    assert not again.given_back, "it is asked for once"


def test_a_generator_that_floods_takes_no_room_of_another() -> None:
    trainer = Trainer(early_bytes=4 * _bytes_of(ORDERED))
    for group in range(16):
        trainer.receive(delivery_of(SampleId(group, 0)), "flood")
    honest = {delivery_of(SampleId(group, 1)).sample for group in range(2)}
    for sample in honest:
        trainer.receive(delivery_of(sample), "honest")
    for group in range(16, 32):
        trainer.receive(delivery_of(SampleId(group, 0)), "flood")
    assert {sample for who, sample in trainer.early() if who == "honest"} == honest
    assert sum(trainer.intake._held_bytes.values()) <= 4 * _bytes_of(ORDERED)
    assert trainer.queue.trajectories == 0
    assert not trainer.queue.take(0, allowed=None)


def test_what_nobody_ordered_is_dropped_with_its_step() -> None:
    trainer = Trainer(early_bytes=_bytes_of(ORDERED))
    for group in range(2):
        trainer.receive(delivery_of(SampleId(group, 0)))
    trainer.intake.forget_before(1)
    assert not trainer.early()
    assert not trainer.intake._given_back
    assert trainer.intake.receive("g", ORDERED, next_step=1), (
        "acknowledged, so that it is forgotten"
    )
    assert trainer.queue.trajectories == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reward": float("nan")}, "reward nan is not finite in float32"),
        ({"terms": (1.0,)}, "results of 1 functions"),
        ({"step": 3}, "the run has 3 steps"),
        ({"sample": SampleId(0, 2)}, "it is outside a group of 2 samples"),
        ({"sample": SampleId(-1, 0)}, "it is outside a group of 2 samples"),
        ({"tokens": ints(3, 4)}, "has 2 tokens, but"),
        ({"tokens": ints(3, 4, 100)}, r"token ids must lie in \[0, 100\)"),
        ({"provenance": b"\0"}, "has 3 tokens, but"),
        ({"segments": ()}, "no segments"),
        ({"segments": (Segment(1, 0, 3),)}, "drawn under version 1, but the trainer is at 0"),
    ],
)
@pytest.mark.parametrize("is_ordered", [False, True], ids=["early", "ordered from another"])
def test_what_no_order_could_name_is_refused_at_once(
    changes: dict[str, Any], reason: str, is_ordered: bool
) -> None:
    trainer = Trainer()
    if is_ordered:
        trainer.order(order_of("h", ORDERED))
    with pytest.raises(DeliveryNotKept, match=reason) as refused:
        trainer.receive(msgspec.structs.replace(ORDERED, **changes))
    assert not refused.value.was_ordered
    assert not trainer.early()
    wanted = trainer.intake.expect(order_of("g", ORDERED), next_step=0)
    same = "sample" not in changes
    assert [*wanted.given_back] == [ORDERED.sample] * same, "so that its group fails, not waits"


def test_an_early_delivery_does_not_keep_its_frame() -> None:
    trainer = Trainer()
    frame = memoryview(bytes(1 << 20))
    big = msgspec.structs.replace(ORDERED, provenance=frame[:3])
    assert not trainer.receive(big)
    (held,) = trainer.order(order_of("g", big))
    assert held == big
    assert len(held.provenance.obj) == 3


def test_orders_of_failed_groups_are_forgotten_with_their_step() -> None:
    trainer = Trainer()
    trainer.order(order_of("g", ORDERED))
    trainer.intake.forget_before(1)
    assert not trainer.intake._orders
    assert trainer.order(order_of("g", ORDERED)) == []


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "step": st.integers(-1, 2),
        "sample": st.builds(SampleId, st.integers(-1, 2), st.integers(-1, 3)),
        "prompt_tokens": st.binary(max_size=9),
        "tokens": st.binary(max_size=16),
        "behaviour_logprobs": st.binary(max_size=16),
        "provenance": st.binary(max_size=4),
        "segments": st.lists(
            st.builds(Segment, st.integers(-1, 1), st.integers(-1, 3), st.integers(-1, 4)),
            max_size=3,
        ).map(tuple),
        "reward": st.floats(),
    },
)


@settings(max_examples=400)
@given(FIELDS, st.booleans())
def test_no_delivery_breaks_the_intake_or_is_kept_unless_ordered(
    fields: dict[str, Any], ordered_first: bool
) -> None:
    trainer = Trainer()
    delivery = msgspec.structs.replace(ORDERED, **fields)
    if ordered_first:
        trainer.order(order_of("g", ORDERED))
    with contextlib.suppress(DeliveryNotKept):
        trainer.receive(delivery)
    same = msgspec.structs.replace(delivery, reward=0.0) == ORDERED
    assert trainer.queue.trajectories <= (ordered_first and same)
