"""What activation checkpointing keeps of a block, and what it computes again.

`true` keeps a block's input alone: all of the forward pass is done twice. `selective` also keeps
the results of attention and of products that are no wider than their input (queries, keys, values,
both output projections). Norms, rotation, activation and the wide products of the MLP are computed
again: about half of a block's forward pass, for a fifth of its memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
}
_PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "mkldnn::_linear_pointwise": (0, 1)}
"""Where the input and the weight are among the arguments."""


def selective() -> Any:
    """The two contexts that `torch.utils.checkpoint` enters, in the first and second pass."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: Any, op: Any, *args: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(op, args) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(op: Any, args: tuple[Any, ...]) -> bool:
    name = op.name().split(".")[0] if isinstance(op, torch._ops.OpOverload) else ""  # noqa: SLF001
    if name in _ATTENTION:
        return True
    if name not in _PRODUCTS:
        return False
    x, weight = (args[place] for place in _PRODUCTS[name])
    wide = weight.shape[0] if name.startswith("mkldnn") else weight.shape[1]
    return bool(wide <= x.shape[-1])
