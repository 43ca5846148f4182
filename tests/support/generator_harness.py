"""A generator process with a fake engine, fake rewards and fake sockets.

A test is a scenario:

    async def scenario(harness: GeneratorHarness) -> None:
        await harness.send(Generate(SAMPLE, PROMPT, 7))
        harness.engine.feed("train-5.1", [3, 4], 1, end="stop")
        await settle()
        assert harness.finished()

    play(scenario)

`play` starts the process before and shuts it down afterwards.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import GenerateRequest, SamplingParams, TokenChunk
from asyncrl.environments.workers.pool import EnvironmentPool
from asyncrl.errors import AsyncrlError
from asyncrl.generator.activity import Activity
from asyncrl.generator.background import ControllerLine
from asyncrl.generator.process import GeneratorProcess
from asyncrl.generator.reports import GeneratorRecords
from asyncrl.generator.sample_rewards import SampleRewards
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.generator.sample_traces import SampleTraces
from asyncrl.generator.turns.environment_turns import Episodes
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics, new_registry
from asyncrl.monitoring.records.timeline import Timeline
from asyncrl.rewards.calls import Reward
from asyncrl.rollout.trajectory import Provenance, SampleId
from asyncrl.wire.messages import from_generator as fg
from asyncrl.wire.messages import to_generator as tg
from asyncrl.wire.records.reward_counts import RewardCounts
from asyncrl.wire.records.step import EngineStats
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest

SAMPLE = SampleId(group=5, sample=1)
PROMPT = tg.PromptPayload("p", np.array([1, 2], "<i4").tobytes(), {"prompt": "?"})


class FakeEngine:
    """Streams the tokens that a test feeds it. Remembers its requests and how they ended.

    `unreported`: by request, the tokens that were drawn and not reported when it is interrupted,
    and their version. `abandoned`: requests whose stream was closed before its end.
    """

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.chunks: dict[str, asyncio.Queue[TokenChunk]] = {}
        self.interrupted: list[str] = []
        self.abandoned: list[str] = []
        self.ended_sessions: list[str] = []
        self.serving: set[str] = set()
        self.unreported: dict[str, tuple[list[int], int]] = {}
        self.version = 0
        self.held = Fingerprint({}, "")
        self.staged: list[int] = []
        self.updates: list[tuple[int, set[str]]] = []
        self.paused = False
        self.saved = False
        self.error: EngineError | None = None

    async def generate(self, request: GenerateRequest) -> Any:
        assert not (self.paused and request.kept is not None)
        if self.error is not None:
            raise self.error
        self.requests.append(request)
        queue = self.chunks.setdefault(request.request_id, asyncio.Queue())
        ended = False
        self.serving.add(request.request_id)
        try:
            while not ended:
                chunk = await queue.get()
                ended = chunk.finish_reason is not None
                yield chunk
        finally:
            self.serving.discard(request.request_id)
            if not ended:
                self.abandoned.append(request.request_id)

    def feed(
        self,
        name: str,
        tokens: list[int],
        version: int,
        *,
        verified: int = 0,
        end: Any = None,
        origins: Sequence[Provenance] = (),
    ):
        """The next chunk; `origins` gives the provenance of each token, instead of `verified`."""
        n = len(tokens)
        provenance = np.full(n, Provenance.SAMPLED, np.uint8)
        provenance[:verified] = Provenance.VERIFIED
        provenance[: len(origins)] = origins
        chunk = TokenChunk(
            name,
            np.array(tokens, np.int32),
            np.full(n, -0.5 - version, np.float32),
            np.array(tokens, np.int32)[:, None],
            np.full((n, 1), -0.5 - version, np.float32),
            np.full(n, 17, np.uint64),
            provenance,
            version,
            end,
        )
        self.chunks.setdefault(name, asyncio.Queue()).put_nowait(chunk)

    def interrupt(self, name: str) -> None:
        self.interrupted.append(name)
        self.serving.discard(name)
        tokens, version = self.unreported.pop(name, ([], 0))
        self.feed(name, tokens, version, end="abort")

    def end_session(self, session: str) -> None:
        self.ended_sessions.append(session)

    async def stage_weights(self, manifest: WeightManifest) -> None:
        self.staged.append(manifest.policy_version)

    async def install_weights(self, version: int) -> None:
        assert self.staged[-1] == version
        self.updates.append((version, set(self.serving)))
        self.version = version

    async def fingerprint(self) -> Fingerprint:
        return self.held

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def save_cache(self) -> int:
        self.saved = True
        return 1

    def stats(self) -> EngineStats:
        return EngineStats(slots=2, policy_version=self.version)


class FakeRewards:
    """The reward is the number of tokens. `gate` holds all rewards back while it is cleared."""

    waiting = running = 0
    longest = ("", 0.0)
    counts = RewardCounts()
    has_functions = False

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.error: AsyncrlError | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def score(
        self, _prompt: str, text: str, row: Any, *, example_id: str, is_beside_another: bool = False
    ) -> Reward:
        assert example_id == "p"
        self.asked.append(text)
        self.rows.append(row)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return Reward(float(len(text.split())), (float(len(text.split())), 0.5))


class FakeLine:
    """One end of a line: `inbox` for the process, `sent` by the process."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: deque[Any] = deque()
        self._changed = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.send_soon(message)

    def send_soon(self, message: Any, *, urgent: bool | None = None) -> None:
        self.sent.append(message)
        self._changed.set()

    async def wait_until_sent(self, count: int) -> None:
        while len(self.sent) < count:
            self._changed.clear()
            await self._changed.wait()

    async def receive(self) -> Any:
        return await self.inbox.get()


class GeneratorHarness:
    """A generator process with two slots among fakes; `settings` go to `GeneratorProcess`."""

    def __init__(
        self,
        noise_floor_every: int | None = None,
        traces: SampleTraces | None = None,
        episodes: Episodes | None = None,
        environment: EnvironmentPool | None = None,
        **settings: Any,
    ) -> None:
        self.engine, self.rewards = FakeEngine(), FakeRewards()
        self.control, self.data = FakeLine(), FakeLine()
        metrics = GeneratorMetrics.register(new_registry(), "g0")
        rewards = SampleRewards(
            self.rewards,  # type: ignore[arg-type]
            lambda tokens: " ".join(map(str, tokens)),
            metrics,
            environment,
        )
        self.generator = SampleGenerator(
            self.engine,  # type: ignore[arg-type]
            rewards,
            SamplingParams(max_tokens=8),
            held_out_sampling=SamplingParams(max_tokens=8, temperature=0.5),
            noise_floor_every=noise_floor_every,
            traces=traces,
            episodes=episodes,
        )
        self.process = GeneratorProcess(
            self.engine,  # type: ignore[arg-type]
            self.generator,
            ControllerLine("g0", self.control),  # type: ignore[arg-type]
            self.data,  # type: ignore[arg-type]
            GeneratorRecords(metrics, Activity(Timeline(None, "g0"), metrics), traces=traces),
            **settings,
        )

    async def send(self, message: tg.ToGenerator) -> None:
        self.control.inbox.put_nowait(message)
        await settle()

    async def delivered(self) -> list[float]:
        """Command the delivery of SAMPLE; the rewards of everything that was delivered."""
        await self.send(tg.Deliver(2, (SAMPLE,)))
        return [delivery.reward for delivery in self.data.sent]

    def finished(self) -> list[fg.SampleFinished]:
        return [m for m in self.control.sent if isinstance(m, fg.SampleFinished)]


async def settle() -> None:
    """Let every task run as far as it can without waiting for a clock."""
    for _ in range(30):
        await asyncio.sleep(0)


async def _play(scenario: Any, settings: dict[str, Any]) -> None:
    harness = GeneratorHarness(**settings)
    running = asyncio.create_task(harness.process.run(metrics_port=None))
    try:
        async with asyncio.timeout(60):
            await settle()
            await scenario(harness)
            await harness.send(tg.Shutdown())
            await running
            assert harness.engine.saved, "the next process has nothing to draft from"
    finally:
        running.cancel()


def play(scenario: Any, **settings: Any) -> None:
    """Run a scenario; `settings` go to `GeneratorHarness`."""
    asyncio.run(_play(scenario, settings))


def verify(seed: int = 9, min_version: int = 2) -> tg.Verify:
    """The command to verify SAMPLE."""
    return tg.Verify((SAMPLE,), (seed,), min_version)
