"""Environments that count, for samples of several turns in a generator among fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from generator_harness import PROMPT, SAMPLE, GeneratorHarness, play
from local_environments import episodes_of

from asyncrl.environments.protocol import Action
from asyncrl.rollout.trajectory import Provenance
from asyncrl.wire.messages import to_generator as tg

NEW, SEEN, KEPT = Provenance.SAMPLED, Provenance.OBSERVED, Provenance.VERIFIED


class Counting:
    """Answers turn t with 50 + t and rewards its length; a 9 ends the sample."""

    replay: ClassVar[Any] = "deterministic"
    log: ClassVar[list[str]] = []
    gate: ClassVar[asyncio.Event | None] = None

    async def reset(self, row: dict[str, Any], seed: int) -> str | None:
        self.turn = 0
        self.log.append(f"reset {row['prompt']}")
        type(self).seed = seed
        return row.get("first")

    async def step(self, action: Action) -> Any:
        self.turn += 1
        self.log.append(action.text)
        if self.gate is not None:
            await self.gate.wait()
        return (str(50 + self.turn), 9 in action.tokens, float(len(action.tokens)))


class Fickle(Counting):
    """As Counting, and never says the same twice."""

    said = 60

    async def step(self, action: Action) -> Any:
        _, done, reward = await super().step(action)
        type(self).said += 1
        return (str(self.said), done, reward)


class Recorded(Fickle):
    replay = "recorded"


class Plain(Counting):
    replay = None


class Restoring(Plain):
    async def snapshot(self) -> int:
        return self.turn

    async def restore(self, state: int) -> None:
        self.log.append(f"restore {state}")
        self.turn = state


async def until(condition: Callable[[], Any]) -> None:
    """Environments are made in threads, so turns of the event loop do not say when."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - it is not said when
            await asyncio.sleep(0.001)


def run(environment: type, scenario: Any, **values: Any) -> None:
    """Play with a fresh class of this kind, so that no test sees another's log."""
    fresh = type(environment.__name__, (environment,), {"log": [], "gate": None})

    async def with_pool(harness: GeneratorHarness) -> None:
        await scenario(harness, fresh, pool)

    episodes, pool = episodes_of(fresh, **values)
    play(with_pool, episodes=episodes, environment=pool)


async def first_turn(harness: GeneratorHarness, tokens: list[int] | None = None) -> None:
    """Generate SAMPLE up to its second turn's request, under version 1."""
    await harness.send(tg.Generate(SAMPLE, PROMPT, 7, priority=1))
    await until(lambda: harness.engine.requests)
    harness.engine.feed("train-5.1", tokens or [3, 4], 1, end="stop")
    await until(lambda: len(harness.engine.requests) == 2)


async def held_after_two_turns(harness: GeneratorHarness) -> None:
    """Have SAMPLE held with the turns [3, 4] and [5, 9]."""
    await first_turn(harness)
    harness.engine.feed("train-5.1+1", [5, 9], 1, end="stop")
    await until(harness.finished)
