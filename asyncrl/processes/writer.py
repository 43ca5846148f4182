"""Writing one sample: from the order, or from what verification is to keep, to its reward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.rewards.pool import RewardPool
from cache.trajectory import KeptTokens, Provenance, SampleId, Trajectory, TrajectoryBuilder
from engine.errors import EngineError
from engine.protocol import Engine, GenerateRequest, SamplingParams
from monitoring.metrics import GeneratorMetrics
from scheduler.messages.to_generator import PromptPayload


@dataclass(frozen=True, slots=True)
class HeldSample:
    """A finished sample that the trainer does not have yet."""

    trajectory: Trajectory
    reward: float
    prompt: PromptPayload
    text: str


@dataclass(frozen=True, slots=True)
class Draft:
    """A sample that is to be written, and what of it there is already."""

    sample: SampleId
    prompt: PromptPayload
    seed: int
    priority: int = 0
    least_version: int = -1
    """What was kept is verified under weights of at least this version."""
    kept: KeptTokens | None = None
    """Tokens of older versions, to be verified first."""
    rewarded: HeldSample | None = None
    """The sample as it was finished before: if all of it is accepted, its reward still holds."""


class SampleWriter:
    """Engine and rewards together."""

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
        self.tokens_verified = 0
        self.tokens_rejected = 0

    def builder(self, sample: SampleId, prompt: PromptPayload) -> TrajectoryBuilder:
        """Where the tokens of a sample are gathered."""
        tokens = np.frombuffer(prompt.tokens, "<i4").astype(np.int32)
        return TrajectoryBuilder(sample, prompt.prompt_id, tokens)

    async def write(
        self, draft: Draft, builder: TrajectoryBuilder, *, purpose: str = "train"
    ) -> HeldSample:
        """Have the tokens drawn into `builder`, and rewarded.

        Raises:
            RequestError: the engine cannot serve it.
            EngineError: the engine failed.
            AsyncrlError: the reward failed.
        """
        name = f"{purpose}-{draft.sample}"
        if draft.kept is not None:
            name += f"-v{draft.least_version}"
        trajectory = await self._generate(draft, builder, name)
        if draft.kept is not None:
            verified = int((trajectory.provenance == Provenance.VERIFIED).sum())
            self.tokens_verified += verified
            self.tokens_rejected += len(draft.kept) - verified
        before = draft.rewarded
        if before is not None and np.array_equal(before.trajectory.tokens, trajectory.tokens):
            return HeldSample(trajectory, before.reward, before.prompt, before.text)
        text, prompt = self._decode(trajectory.tokens.tolist()), draft.prompt
        with self._metrics.reward_time.time():
            reward = await self._rewards.score(str(prompt.row.get("prompt", "")), text, prompt.row)
        return HeldSample(trajectory, reward, prompt, text)

    async def _generate(self, draft: Draft, builder: TrajectoryBuilder, name: str) -> Trajectory:
        request = GenerateRequest(
            request_id=name,
            cache_key=builder.prompt_id,
            prompt_tokens=builder.prompt_tokens,
            sampling=replace(self._sampling, seed=draft.seed),
            kept=draft.kept,
            priority=draft.priority,
        )
        async for chunk in self._engine.generate(request):
            builder.append(
                tokens=chunk.tokens,
                logprobs=chunk.logprobs,
                topk_ids=chunk.topk_ids,
                topk_logprobs=chunk.topk_logprobs,
                provenance=chunk.provenance,
                policy_version=chunk.policy_version,
            )
            if chunk.finish_reason is not None:
                return builder.finish(chunk.finish_reason)
        raise EngineError(f"request {name}: the engine ended the stream without a reason")
