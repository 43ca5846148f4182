"""Rewards of generated samples: decoded and scored while the sample is held."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from asyncrl.environments.protocol import LABEL
from asyncrl.environments.workers.pool import EnvironmentFailed, EnvironmentPool
from asyncrl.generator.turns.conversation import Episode, runs_of
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics
from asyncrl.rewards.calls import Reward
from asyncrl.rewards.pool import RewardPool
from asyncrl.rewards.values import MAX_FLOAT32
from asyncrl.rollout.trajectory import Trajectory
from asyncrl.wire.messages.to_generator import PromptPayload
from asyncrl.wire.records.reward_counts import RewardCounts, RewardWait


@dataclass(frozen=True, slots=True)
class Exchange:
    """The text of a sample's turns."""

    response: str
    """The policy's turns, concatenated."""
    turns: list[dict[str, Any]]
    """`role` ("assistant" or "environment"), `content` and `context`, the number of the text's
    context (from 0). An observation that begins a context is its whole prompt."""
    conversations: list[list[dict[str, Any]]]
    """Chat messages of each context, up to the policy's last turn in it."""

    @property
    def columns(self) -> dict[str, Any]:
        """Columns that are added to the example."""
        return {"turns": self.turns, "conversations": self.conversations}


def exchange_of(
    trajectory: Trajectory, episode: Episode, decode: Callable[[list[int]], str]
) -> Exchange:
    """Decode a finished sample; `decode` leaves special tokens out.

    The first and every other text is the policy's. A conversation has the environment's messages,
    and unshortened earlier turns even where the chat template shortens them (`environment.history:
    template`).
    """
    runs = runs_of(trajectory.tokens, ~trajectory.trained)
    said = [decode(one.tolist()) for one in runs]
    starts = [0, *accumulate(len(one) for one in runs)]
    contexts = np.searchsorted(trajectory.contexts, starts[:-1], side="right").tolist()
    turns = [
        {"role": ("assistant", "environment")[place % 2], "content": text, "context": context}
        for place, (text, context) in enumerate(zip(said, contexts, strict=True))
    ]
    ours = range(0, len(runs), 2)
    last = [one for one in ours if one + 2 not in ours or contexts[one + 2] > contexts[one]]
    return Exchange("".join(said[::2]), turns, [_up_to(one // 2, episode, said) for one in last])


def _up_to(turn: int, episode: Episode, said: Sequence[str]) -> list[dict[str, Any]]:
    if turn < len(episode.turns):
        return [*episode.before(turn), episode.turns[turn].message]
    return [*episode.before(turn), {"role": "assistant", "content": said[2 * turn]}]


@dataclass(eq=False)
class SampleRewards:
    """Computes the rewards of samples in the reward workers; `_environment` adds its own."""

    _pool: RewardPool
    _decode: Callable[[list[int]], str]
    _metrics: GeneratorMetrics
    _environment: EnvironmentPool | None = None
    _tasks: set[asyncio.Task[Reward]] = field(default_factory=set, init=False)

    @property
    def pending(self) -> int:
        """Samples waiting for a reward worker or being scored."""
        return self._pool.waiting + self._pool.running

    def wait(self, step: int, samples: int) -> RewardWait:
        """Describe a step's wait for the rewards of this many samples."""
        function, seconds = self._pool.longest
        return RewardWait(step=step, samples=samples, function=function, seconds=seconds)

    @property
    def counts(self) -> RewardCounts:
        """Failures so far, those counted as zero included."""
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
            asked = str(prompt.example.get("prompt", ""))
            return await self._pool.score(asked, text, prompt.example, example_id=prompt.prompt_id)

    async def _score_episode(
        self, prompt: PromptPayload, trajectory: Trajectory, episode: Episode
    ) -> Reward:
        """Add the functions' terms and the environment's; 0 if the environment failed.

        Functions get the text of the policy's turns, and `Exchange.columns` in the example.
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
                    is_beside_another=True,
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
        """Cancel the running rewards."""
        for task in self._tasks:
            task.cancel()
