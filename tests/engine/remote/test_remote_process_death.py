"""A killed engine core. tests/conftest.py sorts this module after all that use the engine."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from served_engine import SLOTS, Served, ask, collect

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import TokenChunk


def test_a_dead_core_reaches_every_consumer(served: Served) -> None:
    engine = served.engine

    async def die() -> list[BaseException | list[TokenChunk]]:
        requests = [ask(f"doomed{i}", max_tokens=390) for i in range(3 * SLOTS)]
        first = engine.generate(ask("first", max_tokens=390))
        tasks = [asyncio.create_task(collect(engine, request)) for request in requests]
        await anext(first)
        for pid in served.processes():
            os.kill(pid, signal.SIGKILL)
        while engine._process.ended is None:
            await asyncio.wait(tasks, timeout=0.01)
        await first.aclose()
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    for outcome in served.call(die()):
        assert isinstance(outcome, EngineError), outcome
        assert "killed by signal 9" in str(outcome) or "lost" in str(outcome)
    with pytest.raises(EngineError, match=r"was killed by signal 9 \(Killed\)"):
        served.call(engine.score([]))
    with pytest.raises(EngineError, match=r"was killed by signal 9 \(Killed\)"):
        served.call(engine.pause())
