"""The models that the torch engine and the trainer compute in fused layers on a CPU.

Both replace transformers' forward pass of these models (`engine.torch.fused`, `trainer.fused`), and
compare theirs with it at start.
"""

from __future__ import annotations

from typing import Any

import torch

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Prefixes of transformers' classes that are pre-norm, rotary, gated by silu and nothing else."""
_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position alone."""
SERIAL_PARAMETERS = 1 << 20
"""Parameters of a layer up to which several threads do not make it faster. The kernels use one."""


def why_not_fused(model: Any, *, threads: int) -> str | None:
    """Return why a loaded model runs through transformers' forward pass; None: it need not."""
    name, config = type(model).__name__, model.config
    if name not in {f"{family}ForCausalLM" for family in FAMILIES}:
        return f"{name} is not one of {', '.join(FAMILIES)}"
    if (model.device.type, model.dtype) != ("cpu", torch.float32):
        return f"it computes in {model.dtype} on {model.device.type}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act!r}"
    rotary = model.model.rotary_emb
    if getattr(rotary, "rope_type", "default") not in _ROTARY:
        return f"its rotary embedding is {rotary.rope_type!r}"
    if len(rotary.inv_freq) * 2 != head_size(config):
        return "it rotates part of a head"
    parameters = sum(p.numel() for p in model.model.layers[0].parameters())
    if threads > 1 and parameters > SERIAL_PARAMETERS:
        return f"its layers are large enough for {threads} threads"
    return None


def head_size(config: Any) -> int:
    """Return the size of one attention head, from transformers' configuration of the model."""
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)
