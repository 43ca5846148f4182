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

from asyncrl.processes.trainer.group_queue import GroupQueue
from asyncrl.processes.trainer.intake import EARLY_SECONDS, DeliveryNotKept, Intake
from rollout.trajectory import SampleId, Segment
from trainer.group_check import check_trajectory
from wire.messages.data import TrajectoryDelivery
from wire.messages.to_trainer import Expect

ORDERED = delivery_of(SampleId(0, 1))


class Trainer:
    """An intake of groups of two, at version 0."""

    def __init__(self, max_early: int = 4) -> None:
        self.queue = GroupQueue(2)
        self.intake = Intake(
            self.queue, lambda one: check_trajectory(one, 100, 0), max_early=max_early, functions=2
        )

    def order(self, order: Expect) -> list[TrajectoryDelivery]:
        return [delivery for _, delivery in self.intake.expect(order, next_step=0)]

    def receive(self, delivery: TrajectoryDelivery, generator: str = "g", now: float = 0.0) -> bool:
        return self.intake.receive(generator, delivery, next_step=0, now=now)


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
        ({"terms": (1.0,)}, "rewards of 1 functions"),
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
        ({"provenance": b"\0\0\4"}, "4 is no provenance"),
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


def test_what_another_generator_delivers_is_refused() -> None:
    trainer = Trainer()
    trainer.order(order_of("g", ORDERED))
    with pytest.raises(DeliveryNotKept, match=r"0\.1 was ordered from g, not thief") as refused:
        trainer.receive(ORDERED, "thief")
    assert not refused.value.was_ordered, "the run still waits for the one that was ordered"
    assert trainer.receive(ORDERED)


def test_what_nobody_ordered_is_refused_after_a_while_and_bounded() -> None:
    trainer = Trainer(max_early=4)
    forged = [delivery_of(SampleId(group, sample)) for group in range(16) for sample in range(2)]
    refused = 0
    for delivery in forged:
        try:
            assert not trainer.receive(delivery)
        except DeliveryNotKept:
            refused += 1
    assert refused == len(forged) - 4
    assert list(trainer.intake.overdue(EARLY_SECONDS - 1)) == []
    overdue = [str(error) for _, error in trainer.intake.overdue(EARLY_SECONDS)]
    assert overdue[0] == "sample 14.0 was not ordered from g within 5 s"
    assert len(overdue) == 4
    assert trainer.queue.trajectories == 0
    assert trainer.queue.take(0, allowed=None) is None


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
