"""Writing samples: an engine for their tokens, reward workers for their rewards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from asyncrl.processes.writing import HeldSample, Writing
from asyncrl.rewards.pool import RewardPool
from engine.errors import EngineError
from engine.protocol import Engine, SamplingParams
from monitoring.metrics import GeneratorMetrics
from rollout.trajectory import FinishReason, Trajectory
from wire.messages.to_generator import PromptPayload
from wire.records import TokenCounts

_MOST_UNASKED = 8
"""So often an engine may end one sample by itself, and it goes on."""


class SampleWriter:
    """Carries samples through their stretches; see `asyncrl.processes.writing`."""

    def __init__(
        self,
        engine: Engine,
        rewards: RewardPool,
        *,
        decode: Callable[[list[int]], str],
        sampling: SamplingParams,
        metrics: GeneratorMetrics,
    ) -> None:
        self._engine = engine
        self._rewards = rewards
        self._decode = decode
        self._sampling = sampling
        self._metrics = metrics
        self._open = asyncio.Event()
        self._open.set()
        self._drawing = asyncio.Event()
        self._drawing.set()
        self._rewarding: set[asyncio.Task[float]] = set()
        self.tokens = TokenCounts()
        """What only the generator can count: `verified`, `rejected` and `outside_top_k`."""

    def hold(self) -> None:
        """Begin no stretch until `go_on`."""
        self._open.clear()

    def go_on(self) -> None:
        """The end of `hold`."""
        self._open.set()

    def paused(self, paused: bool) -> None:
        """Say whether the engine is paused: it may then not be able to verify."""
        if paused:
            self._drawing.clear()
        else:
            self._drawing.set()

    async def interrupt(self, writing: Writing) -> None:
        """End the stretch in hand; the sample goes on with another, as its state says."""
        if writing.request_id is not None:
            writing.interrupting = True
            await self._engine.interrupt(writing.request_id)

    async def write(self, writing: Writing) -> HeldSample:
        """Have the tokens drawn; the reward of what comes out is on its way.

        Raises:
            RequestError: the engine cannot serve it.
            EngineError: the engine failed, or was closed.
        """
        unasked = 0
        while True:
            writing.turn()
            await self._open.wait()
            if writing.verifying:
                await self._drawing.wait()
            reason = await self._stretch(writing)
            unasked += reason == "abort" and not writing.interrupting
            if unasked > _MOST_UNASKED:
                raise EngineError(
                    f"sample {writing.sample}: the engine gave it up {unasked} times unasked"
                )
            end = writing.finish(reason)
            if end is not None:
                trajectory = writing.builder.finish(end)
                reward = writing.known_reward(trajectory) or self._reward(writing, trajectory)
                return HeldSample(trajectory, writing.prompt, reward)

    async def _stretch(self, writing: Writing) -> FinishReason:
        """One request, to its end; its tokens are appended as they come."""
        writing.turn()  # something may have been ordered while this waited
        request = writing.request(self._sampling)
        builder = writing.builder
        writing.request_id, writing.interrupting = request.request_id, False
        try:
            async for chunk in self._engine.generate(request):
                if len(chunk.tokens):
                    writing.holds = True
                    if writing.began is None:
                        writing.began = time.monotonic()
                listed = (chunk.topk_ids == chunk.tokens[:, None]).any(axis=1)
                self.tokens += TokenCounts(outside_top_k=int(len(listed) - listed.sum()))
                builder.append(
                    tokens=chunk.tokens,
                    logprobs=chunk.logprobs,
                    topk_ids=chunk.topk_ids,
                    topk_logprobs=chunk.topk_logprobs,
                    provenance=chunk.provenance,
                    policy_version=chunk.policy_version,
                )
                if chunk.finish_reason is not None:
                    return chunk.finish_reason
        finally:
            writing.request_id, writing.holds = None, False
            if request.kept is not None:
                accepted, rejected = writing.verified()
                self.tokens += TokenCounts(verified=accepted, rejected=rejected)
        raise EngineError(f"request {request.request_id}: the stream ended without a reason")

    def _reward(self, writing: Writing, trajectory: Trajectory) -> asyncio.Task[float]:
        """Begin to compute it; who awaits it gets what it raises (AsyncrlError)."""
        task = asyncio.create_task(self._score(writing.prompt, trajectory))
        self._rewarding.add(task)
        task.add_done_callback(self._rewarding.discard)
        # What nobody awaits in the end (a sample that was discarded) may fail in silence.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _score(self, prompt: PromptPayload, trajectory: Trajectory) -> float:
        text = self._decode(trajectory.tokens.tolist())
        with self._metrics.reward_time.time():
            return await self._rewards.score(
                str(prompt.example.get("prompt", "")), text, prompt.example
            )

    def close(self) -> None:
        """Give up the rewards that are being computed."""
        for task in self._rewarding:
            task.cancel()
