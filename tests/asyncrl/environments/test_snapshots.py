"""A state to go back to must be what it was; sharing parts with its environment is found."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
from counting_environments import KEPT, NEW, SEEN, Plain, held_after_two_turns, run, until
from generator_harness import GeneratorHarness, verify
from local_environments import LocalPool

from asyncrl.environments.protocol import Action, BadAnswerError
from asyncrl.environments.workers.worker import Snapshots


def test_a_state_is_given_back_if_it_is_what_it_was() -> None:
    kept, live = Snapshots(), {"board": [0, 0], "lock": None}
    for turn in range(3):
        kept.add(copy.deepcopy(live))
        live["board"][0] = turn + 1  # type: ignore[index]
    assert kept.take(1) == {"board": [1, 0], "lock": None}
    with pytest.raises(IndexError):
        kept.take(1)  # it and the later ones are forgotten
    assert kept.take(0) == {"board": [0, 0], "lock": None}


def test_a_shallow_copy_is_seen() -> None:
    kept, live = Snapshots(), {"board": [0, 0]}
    kept.add(dict(live))
    live["board"][0] = 1
    with pytest.raises(BadAnswerError, match=r"before turn 0 has changed: .*deep copy"):
        kept.take(0)


@pytest.mark.parametrize("state", [[threading.Lock(), 0], ["x" * (2 << 20), 0]])
def test_what_cannot_be_compared_is_given_back_as_it_is(state: list[Any]) -> None:
    kept = Snapshots()
    kept.add(state)
    state[1] = 1
    assert kept.take(0) is state


def test_an_environment_that_gives_its_own_list_fails_when_it_goes_back() -> None:
    class Sharing(Plain):
        async def snapshot(self) -> list[str]:
            return self.said

        async def restore(self, state: list[str]) -> None:
            self.said = state

        async def reset(self, row: dict[str, Any], seed: int) -> str | None:
            self.said: list[str] = []
            return await super().reset(row, seed)

        async def step(self, action: Action) -> Any:
            self.said.append(action.text)
            return await super().step(action)

    async def scenario(harness: GeneratorHarness, env: Any, pool: LocalPool) -> None:
        await held_after_two_turns(harness)
        await harness.send(verify())
        await until(lambda: len(harness.engine.requests) == 3)
        origins = [KEPT, KEPT, SEEN, NEW, NEW]
        harness.engine.feed("train-5.1-v2", [3, 4, 51, 6, 9], 2, origins=origins, end="stop")
        await until(lambda: len(harness.finished()) == 2)
        assert await harness.delivered() == [0.0]
        failed = harness.generator.rewards.counts.failed
        assert failed == {"environment": {"wrong_type": 1}}

    run(Sharing, scenario, rewards={"on_error": "zero"})
