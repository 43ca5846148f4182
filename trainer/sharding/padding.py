"""A sample of padding: what a rank computes while others have work and it has none.

Its tokens have weight 0 and its loss is multiplied by 0, so its gradient is 0, and it is in no
count. It is as short as a sample can be, and goes through the same passes as any other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from asyncrl.rollout.trajectory import Provenance, SampleId, Trajectory, TrajectoryBuilder
from asyncrl.trainer.algorithms.base import LossSums, TokenBatch
from asyncrl.trainer.model.micro_batches import Work

_TOKENS = np.zeros(2, np.int32)
"""Every vocabulary has token 0."""


def padding(version: int) -> Work:
    """One sample of this policy version, of a group that is nobody's."""
    return Work([_sample(version)], [0.0], [(-1, 0)], is_padding=True)


def without_weight(batch: TokenBatch) -> TokenBatch:
    """The tokens of padding, which count nowhere."""
    return replace(batch, weights=torch.zeros_like(batch.weights))


def without_effect(sums: LossSums) -> LossSums:
    """A loss whose gradients are 0, of as many parts."""
    parts = {name: 0.0 * one for name, one in sums.parts.items()}
    return LossSums(0.0 * sums.loss, sums.sums, parts)


def _sample(version: int) -> Trajectory:
    count = len(_TOKENS)
    builder = TrajectoryBuilder(SampleId(0, 0), "", _TOKENS[:1])
    builder.append(
        tokens=_TOKENS,
        logprobs=np.full(count, -1, np.float32),
        topk_ids=_TOKENS[:, None],
        topk_logprobs=np.full((count, 1), -1, np.float32),
        noise_seeds=np.zeros(count, np.uint64),
        provenance=np.full(count, Provenance.SAMPLED, np.uint8),
        policy_version=version,
    )
    return builder.finish("stop")
