"""Rewards of generated samples: decoded and scored while the sample is held."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from asyncrl.environments.pool import EnvironmentFailed, EnvironmentPool
from asyncrl.environments.protocol import LABEL
from asyncrl.generator.conversation import Episode
from asyncrl.generator.reward_inputs import exchange_of
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics
from asyncrl.rewards.calls import Reward
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.values import MAX_FLOAT32
from asyncrl.rollout.trajectory import Trajectory
from asyncrl.wire.messages.to_generator import PromptPayload
from asyncrl.wire.records.reward_counts import RewardCounts


class SampleRewards:
    """Computes the rewards of samples in the reward workers.

    Args:
        pool: started reward workers.
        decode: the text of response tokens.
        metrics: gets the seconds of each reward.
        environment: adds its reward; None: there is none.
    """

    def __init__(
        self,
        pool: RewardPool,
        decode: Callable[[list[int]], str],
        metrics: GeneratorMetrics,
        environment: EnvironmentPool | None = None,
    ) -> None:
        self._pool = pool
        self._environment = environment
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
        counts = self._pool.counts
        if self._environment is None or not self._environment.failures:
            return counts
        return counts + RewardCounts(failed={LABEL: dict(self._environment.failures)})

    def start(
        self, prompt: PromptPayload, trajectory: Trajectory, episode: Episode | None = None
    ) -> asyncio.Task[Reward]:
        """Start to compute a reward. Awaiting the task raises AsyncrlError if that fails."""
        if episode is None:
            task = asyncio.create_task(self._score(prompt, trajectory))
        else:
            task = asyncio.create_task(self._score_episode(prompt, trajectory, episode))
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

    async def _score_episode(
        self, prompt: PromptPayload, trajectory: Trajectory, episode: Episode
    ) -> Reward:
        """The functions' terms and the environment's; 0 if the environment has failed.

        Functions get the text of the policy's turns, one after the other, and the whole exchange as
        `example["turns"]` and `example["conversations"]`.
        """
        pool = self._environment
        if episode.failed or pool is None:
            return Reward(0.0, verdict="unscored" if episode.unscored else "failed")
        earned, functions = episode.reward, Reward(0.0)
        if self._pool.has_functions:
            exchange = exchange_of(trajectory, episode, self._decode)
            with self._metrics.reward_time.time():
                functions = await self._pool.score(
                    str(prompt.example.get("prompt", "")),
                    exchange.response,
                    {**prompt.example, **exchange.columns},
                    example_id=prompt.prompt_id,
                )
            if not functions.terms:
                return functions  # a function has failed, and that counts as 0
        value = functions.value + pool.config.reward_weight * earned
        if not (math.isfinite(value) and max(abs(value), abs(earned)) <= MAX_FLOAT32):
            text = f"its rewards add up to {earned:g}, which is not finite in float32"
            error = EnvironmentFailed(f"environment {pool.config.name!r}: {text}", "not_finite")
            pool.count(error)
            if pool.rewards.on_error == "stop":
                raise error
            return Reward(0.0, verdict="failed")
        return Reward(value, (*functions.terms, earned))

    def close(self) -> None:
        """Cancel the rewards that are being computed."""
        for task in self._tasks:
            task.cancel()
