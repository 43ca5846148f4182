"""One generator of the loop: a real generator process on a real engine, whose messages are late."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import numpy as np

from asyncrl.engine.protocol import Engine
from asyncrl.wire.messages import data
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.records.step import TokenCounts
from benchmarks.exactness_loop.generator import EngineClock, FakeLine, generator_process
from benchmarks.exactness_loop.outcome import LoopSettings


class Loop(Protocol):
    """The scheduler's and the trainer's side of a member's lines."""

    def on_message(self, member: Member, message: Any) -> None:
        """A message to the scheduler has arrived."""

    def on_delivery(self, member: Member, message: data.TrajectoryDelivery) -> None:
        """A trajectory has arrived at the trainer."""


class Member:
    """A generator and its lines to the scheduler and the trainer."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        settings: LoopSettings,
        rng: np.random.Generator,
        loop: Loop,
    ) -> None:
        self.name = name
        self.slots: int | None = None
        """That the scheduler is told of; None until the generator is ready."""
        self._engine = engine
        self._settings = settings
        self._rng = rng
        self._loop = loop
        self._accepted_before = engine.stats().tokens.accepted
        self._clock = EngineClock([engine], settings.poll_seconds)
        self._last_arrival = self._clock.now
        self._messages: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._control = FakeLine(self._delay)
        self._trainer = FakeLine(lambda message: loop.on_delivery(self, message))
        self._process, self._generator, self.lists = generator_process(
            name, engine, settings.sampling, self._control, self._trainer
        )

    def successor(self, name: str) -> Member:
        return Member(name, self._engine, self._settings, self._rng, self._loop)

    @property
    def running(self) -> int:
        return self._engine.stats().running

    @property
    def tokens(self) -> TokenCounts:
        """Verified and rejected tokens, and accepted drafts, of this run."""
        accepted = self._engine.stats().tokens.accepted - self._accepted_before
        return self._generator.tokens + TokenCounts(accepted=accepted)

    def send(self, message: tg.ToGenerator) -> None:
        self._control.inbox.put_nowait(message)

    def acknowledge(self, message: data.Received) -> None:
        self._trainer.inbox.put_nowait(message)

    async def serve(self) -> None:
        """Run the generator until it is told to shut down."""
        await self._process.run(metrics_port=None)

    async def pass_on_messages(self) -> None:
        """Pass each message on when it is due, the last one included."""
        while True:
            arrival, message = await self._messages.get()
            await self._clock.until(arrival)
            if isinstance(message, fg.Goodbye):
                return
            self._loop.on_message(self, message)

    def _delay(self, message: Any) -> None:
        """Have a message arrive late, and after the messages before it."""
        if isinstance(message, fg.GeneratorReport):
            return
        delay = int(self._rng.choice(self._settings.message_delays))
        if isinstance(message, fg.WeightsInstalled):
            delay += self._settings.install_delay
        self._last_arrival = max(self._last_arrival, self._clock.now + delay)
        self._messages.put_nowait((self._last_arrival, message))
