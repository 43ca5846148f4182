"""The real controller trains a step with peers on real sockets, messages together and alone."""

from __future__ import annotations

import pytest

import wire.outbox
from benchmarks.controller.main import GENERATORS, measure
from benchmarks.controller.peers import SLOTS


@pytest.mark.parametrize("batched", [True, False])
def test_a_step_is_trained_whether_messages_travel_together_or_alone(batched: bool) -> None:
    before = wire.outbox.MAX_MESSAGES
    cost = measure(32, batched=batched, steps=1)
    assert cost.samples == GENERATORS * SLOTS
    assert cost.cpu_seconds > 0
    assert before == wire.outbox.MAX_MESSAGES
