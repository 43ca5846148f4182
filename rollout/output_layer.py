"""Logits in float32 from 16-bit hidden states and weights; engines and trainer compute them alike.

A logit of 16 to 32 is a multiple of 0.125 in bfloat16. Kernels that sum in another order round it
to another multiple, so decoding, verification and the trainer would disagree about the probability
of one token in four or so that is not certain.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear


def float32_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply `[..., C]` and `[V, C]` of one type to float32 `[..., V]`.

    CUDA needs no float32 copy of the weight; elsewhere torch lacks such a product, and makes one.
    """
    wide = None if bias is None else bias.float()
    if hidden.is_cuda and hidden.dtype.itemsize == 2:
        flat: torch.Tensor = torch.mm(hidden.flatten(0, -2), weight.t(), out_dtype=torch.float32)
        logits: torch.Tensor = flat.unflatten(0, hidden.shape[:-1])
        return logits if wide is None else logits + wide
    return linear(hidden.float(), weight.float(), wide)
