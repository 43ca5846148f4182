"""Parts of models that engines and trainer compute alike.

**Attention** of models that cap scores or have sinks:

score = scale * q . k                       capped: softcap * tanh(score / softcap)   (Gemma 2)
weight = exp(score) / (exp(sink) + sum of exp(score))      sink: one number a head    (gpt-oss)

**Logits** in float32 from 16-bit hidden states and weights. A logit of 16 to 32 is a multiple of
0.125 in bfloat16. Kernels that sum in another order round it to another multiple, so decoding,
verification and the trainer would disagree about the probability of one token in four or so that is
not certain.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear


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


def float32_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply `[..., C]` and `[V, C]` of one type to float32 `[..., V]`.

    CUDA needs no float32 copy of the weight; elsewhere torch lacks such a product, and makes one.
    """
    wide = None if bias is None else bias.float()
    if hidden.is_cuda and hidden.dtype.itemsize == 2:
        flat: Tensor = torch.mm(hidden.flatten(0, -2), weight.t(), out_dtype=torch.float32)
        logits: Tensor = flat.unflatten(0, hidden.shape[:-1])
        return logits if wide is None else logits + wide
    return linear(hidden.float(), weight.float(), wide)
