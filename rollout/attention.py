"""Attention weights of models that cap scores or have sinks: the same in engine and trainer.

score = scale * q . k                       capped: softcap * tanh(score / softcap)   (Gemma 2)
weight = exp(score) / (exp(sink) + sum of exp(score))      sink: one number a head    (gpt-oss)
"""

from __future__ import annotations

import torch
from torch import Tensor


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Limit scores to within `softcap` of 0; None: leave them as they are."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def weights_of(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of `[..., L]`, of which a sink takes a share.

    `scores` are capped, -inf for hidden keys. `sinks` are scores of keys without values, broadcast
    to `[..., 1]`; None: none.
    """
    if sinks is None:
        return torch.softmax(scores, -1)
    sink = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]
