"""Requests on their way to a core that is made up: weights and ends that come at awkward times."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import GenerateRequest, SamplingParams, TokenChunk
from asyncrl.engine.remote.client.core import CoreRequest
from asyncrl.engine.remote.client.generation import Generation
from asyncrl.engine.remote.client.responses import Inbox, Responses
from asyncrl.engine.remote.client.streams import Reader, Streams
from asyncrl.engine.remote.extras import StepTable
from asyncrl.engine.requests import Limits, SeedStream

SECONDS, TURNS = 20.0, 100


@dataclass
class SlowCore:
    """Knows a request once `gate` is open; an end that comes before it is not heard."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    running: dict[str, Inbox[Any]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    tokens: int = 3

    def __post_init__(self) -> None:
        self.name = "a core"
        self.process = SimpleNamespace(ended=None, failure=EngineError)
        self.min_temperature = 0.0
        self.policy_version = 0
        self.responses = Responses(1)
        self.meter = SimpleNamespace(busy=lambda: None, idle=lambda: None)

    async def submit(self, request_id: str, inbox: Inbox[Any], request: CoreRequest) -> None:
        self.calls.append(f"sent {request_id}")
        await self.gate.wait()
        self.running[request_id] = inbox
        self.calls.append(f"knows {request_id}")

    async def abort(self, request_ids: list[str]) -> None:
        for name in request_ids:
            inbox = self.running.pop(name, None)
            if inbox is not None:
                self.calls.append(f"ends {name}")
                inbox.put(None)

    async def interrupt(self, request_id: str) -> None:
        if request_id in self.running:
            self.calls.append(f"interrupts {request_id}")
            self.running.pop(request_id).put(None)

    def step(self) -> None:
        """Every request draws all of its tokens."""
        for inbox in self.running.values():
            n = self.tokens
            table = StepTable(
                np.ones((n, 65), np.int32), np.zeros((n, 65), np.float32), np.full(n, inbox.ticket)
            )
            self.responses.record(table, self.policy_version)
            self.responses.end(inbox, "length")  # type: ignore[arg-type]
        self.running.clear()


class Scene:
    def __init__(self) -> None:
        self.core = SlowCore()
        core: Any = self.core
        self.streams = Streams(core)
        self.generation = Generation(core, self.streams, Limits(100, 10, 64), SeedStream(1))

    def read(self, name: str = "r") -> asyncio.Task[list[TokenChunk]]:
        return asyncio.create_task(self._collect(name))

    async def _collect(self, name: str) -> list[TokenChunk]:
        request = GenerateRequest(name, "", np.array([1], np.int32), SamplingParams(3))
        return [chunk async for chunk in self.generation.chunks(request)]

    async def until(self, call: str) -> None:
        """Wait for a call of the core."""
        for _ in range(TURNS):
            if call in self.core.calls:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{call!r} is not in {self.core.calls}")


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, SECONDS))


def test_a_request_that_new_weights_overtake_on_its_way_is_sent_again() -> None:
    """Its prefix KV is named by the old weights. The core knows of its end once it knows it."""

    async def play_it() -> None:
        scene = Scene()
        core, reading = scene.core, scene.read()
        await scene.until("sent r0")
        core.policy_version = 1
        await scene.streams.restart_unstarted()
        core.gate.set()
        await scene.until("knows r1")
        assert list(core.running) == ["r1"], "the first one would run for nobody"
        core.step()
        (chunk,) = await reading
        assert (chunk.finish_reason, len(chunk.tokens)) == ("length", 3)
        assert core.calls == ["sent r0", "knows r0", "ends r0", "sent r1", "knows r1"]
        assert not len(scene.streams)

    play(play_it())


def test_a_request_that_new_weights_find_waiting_is_sent_again() -> None:
    async def play_it() -> None:
        scene = Scene()
        core, reading = scene.core, scene.read()
        core.gate.set()
        await scene.until("knows r0")
        await scene.streams.restart_unstarted()
        await scene.until("knows r1")
        core.step()
        assert (await reading)[-1].finish_reason == "length"
        assert core.calls == ["sent r0", "knows r0", "ends r0", "sent r1", "knows r1"]

    play(play_it())


@pytest.mark.parametrize("overtaken", [False, True])
def test_an_interruption_on_the_way_ends_the_request_at_the_core(overtaken: bool) -> None:
    async def play_it() -> None:
        scene = Scene()
        core, reading = scene.core, scene.read()
        await scene.until("sent r0")
        scene.generation.interrupt("r")
        if overtaken:
            await scene.streams.restart_unstarted()
        core.gate.set()
        (chunk,) = await reading
        assert (chunk.finish_reason, len(chunk.tokens)) == ("abort", 0)
        assert not core.running
        assert not len(scene.streams)

    play(play_it())


def test_a_scored_request_that_is_interrupted_on_the_way_ends_at_the_core() -> None:
    async def play_it() -> None:
        scene = Scene()
        reader, request = Reader(), SimpleNamespace()
        core = scene.core
        scoring = asyncio.create_task(scene.streams.scored("s", request, reader))  # type: ignore[arg-type]
        await scene.until("sent r0")
        reader.interrupt()
        core.gate.set()
        assert await scoring is None
        assert core.calls == ["sent r0", "knows r0", "interrupts r0"]

    play(play_it())


def test_a_reader_that_leaves_ends_its_request_and_no_other() -> None:
    """Ids that begin alike: r1 and r10, at the core and at the reader."""

    async def play_it() -> None:
        scene = Scene()
        core = scene.core
        core.gate.set()
        reading = [scene.read(f"r{i}") for i in range(11)]
        await scene.until("knows r10")
        scene.generation.interrupt("r1")
        (chunk,) = await reading[1]
        assert chunk.finish_reason == "abort"
        assert "interrupts r1" in core.calls
        assert sorted(core.running) == sorted(f"r{i}" for i in range(11) if i != 1)
        reading[2].cancel()
        await scene.until("ends r2")
        core.step()
        others = [await one for i, one in enumerate(reading) if i not in (1, 2)]
        assert all(chunks[-1].finish_reason == "length" for chunks in others)

    play(play_it())


def test_two_requests_of_one_id_are_both_served_and_both_interrupted() -> None:
    """One that was left may still be on its way out when its id is used again."""

    async def play_it() -> None:
        scene = Scene()
        core = scene.core
        core.gate.set()
        reading = [scene.read(), scene.read(), scene.read()]
        await scene.until("knows r2")
        reading[2].cancel()
        await scene.until("ends r2")
        scene.generation.interrupt("r")
        assert [(await one)[-1].finish_reason for one in reading[:2]] == ["abort"] * 2
        assert not core.running
        last = scene.read()
        await scene.until("knows r3")
        core.step()
        assert (await last)[-1].finish_reason == "length"

    play(play_it())
