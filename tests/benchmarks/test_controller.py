"""The real controller trains a step with peers on real sockets, however messages travel."""

from __future__ import annotations

import pytest

from asyncrl.wire.transport import outbox
from benchmarks.controller.main import Load, measure


@pytest.mark.usefixtures("_forked_runs")
@pytest.mark.parametrize(
    "load",
    [
        Load(slots=64, together=32),
        Load(slots=64, together=32, batched=False),
        Load(generators=4, slots=32, together=8, per_relay=2, tcp=True, curve=False),
    ],
    ids=["together", "alone", "relays"],
)
def test_a_step_is_trained_however_messages_travel(load: Load) -> None:
    before = outbox.MAX_MESSAGES
    cost = measure(load, steps=1)
    assert cost.samples == load.generators * load.slots
    assert cost.events >= 2 * cost.samples, "each is finished and delivered"
    assert cost.cpu_seconds > cost.main_seconds > 0
    assert before == outbox.MAX_MESSAGES
