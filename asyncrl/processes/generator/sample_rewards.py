"""Rewards of generated samples: decoded and scored while the sample is held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncrl.rewards.calls import Reward
from asyncrl.rewards.pool import RewardPool
from monitoring.metrics import GeneratorMetrics
from rollout.trajectory import Trajectory
from wire.messages.to_generator import PromptPayload
from wire.records import RewardCounts


class SampleRewards:
    """Computes the rewards of samples in the reward workers.

    Args:
        pool: started reward workers.
        decode: the text of response tokens.
        metrics: gets the seconds of each reward.
    """

    def __init__(
        self, pool: RewardPool, decode: Callable[[list[int]], str], metrics: GeneratorMetrics
    ) -> None:
        self._pool = pool
        self._decode = decode
        self._metrics = metrics
        self._tasks: set[asyncio.Task[Reward]] = set()

    @property
    def pending(self) -> int:
        """Samples that wait for a reward worker or are with one."""
        return self._pool.waiting + self._pool.running

    @property
    def counts(self) -> RewardCounts:
        """What went wrong so far, failures counted as zero included."""
        return self._pool.counts

    def start(self, prompt: PromptPayload, trajectory: Trajectory) -> asyncio.Task[Reward]:
        """Start to compute a reward. Awaiting the task raises AsyncrlError if that fails."""
        task = asyncio.create_task(self._score(prompt, trajectory))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A discarded sample's reward is never awaited; without this asyncio would log its error.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _score(self, prompt: PromptPayload, trajectory: Trajectory) -> Reward:
        text = self._decode(trajectory.tokens.tolist())
        with self._metrics.reward_time.time():
            question = str(prompt.example.get("prompt", ""))
            return await self._pool.score(
                question, text, prompt.example, example_id=prompt.prompt_id
            )

    def close(self) -> None:
        """Cancel the rewards that are being computed."""
        for task in self._tasks:
            task.cancel()
