"""The trained tokens of some samples, as a loss takes them, with their weights in the step.

    loss_normalization   weight of a token   denominator
    token                1                   trained tokens of the step (DAPO, 2503.14476, eq. 8)
    sequence             1 / L               samples of the step (GRPO, 2402.03300, eq. 3)
    sample               1                   samples of the step (Dr. GRPO, 2503.20783)

L and the denominators count trained tokens alone, not those of an environment
(`Trajectory.trained`). Only `sample` is unbiased: a sample's gradient is that of its
log-probability, divided by a number that does not depend on what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.rollout.trajectory import CUT_OFF, FloatArray, Trajectory
from asyncrl.trainer.algorithms.base import Rewards, TokenBatch


def to_device(
    values: NDArray[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy values to the device without making the host wait for it.

    A copy to a GPU from pageable memory returns when everything queued before it has been computed.
    From pinned memory it is one more entry of the device's queue.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if dtype is not None:
        tensor = tensor.to(dtype)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


Normalization = Literal["token", "sequence", "sample"]


def token_weights(kind: Normalization, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Map `[B]` lengths of samples to the `[B]` weight of each of their tokens."""
    return 1.0 / lengths if kind == "sequence" else np.ones(len(lengths))


def denominator(kind: Normalization, *, tokens: int, samples: int) -> float:
    """Loss denominator of a step, at least 1."""
    return float(max(1, tokens if kind == "token" else samples))


def token_batch(
    logprobs: Tensor,
    trajectories: Sequence[Trajectory],
    advantages: Rewards,
    normalization: Normalization,
    *,
    masks_truncated: bool = False,
) -> TokenBatch:
    """Build a batch of B trajectories from `[N]` log-probabilities and `[B]` advantages.

    N tokens are trained; observed ones (`Trajectory.trained`) count nowhere.
    """
    lengths = np.array([t.trained_count for t in trajectories])

    def put(values: NDArray[Any]) -> Tensor:
        return to_device(values, logprobs.device, logprobs.dtype)

    owners = np.repeat(np.arange(len(lengths)), lengths)
    return TokenBatch(
        logprobs=logprobs,
        behaviour_logprobs=put(behaviour_logprobs_of(trajectories)),
        advantages=put(np.repeat(advantages, lengths)),
        weights=put(weights_of(trajectories, normalization, masks_truncated=masks_truncated)),
        owners=to_device(owners, logprobs.device),
    )


def weights_of(
    trajectories: Sequence[Trajectory], normalization: Normalization, *, masks_truncated: bool
) -> NDArray[np.float64]:
    """`[N]` weights of the trained tokens; `masks_truncated` gives cut-off samples weight 0."""
    lengths = np.array([t.trained_count for t in trajectories])
    weights = token_weights(normalization, lengths)
    if masks_truncated:
        weights = weights * [one.finish_reason not in CUT_OFF for one in trajectories]
    return np.repeat(weights, lengths)


def behaviour_logprobs_of(trajectories: Sequence[Trajectory]) -> FloatArray:
    """`[N]` of the trained tokens, as the engine recorded them."""
    return np.concatenate([one.behaviour_logprobs[one.trained] for one in trajectories])
