"""Give a small trained model the cost of a big one without changing its outputs.

The model is copied into one with a much larger `intermediate_size`. The new part has random gate
and up rows and zero columns in the down projection, so the outputs are the same and the matrix
products are those of the big model. The random part depends on the seed alone, so two widened
versions of a model differ only in what was trained.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.initialization import no_init_weights


def widen(source: str, target: Path, intermediate_size: int, seed: int = 0) -> int:
    """Write the widened copy of a gated-MLP model (Qwen, Llama) and return its parameter count."""
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    old = int(small.config.intermediate_size)
    if intermediate_size <= old:
        raise ValueError(f"intermediate_size {intermediate_size} must be above the model's {old}")
    config = type(small.config).from_dict(
        small.config.to_dict() | {"intermediate_size": intermediate_size}
    )
    with no_init_weights():
        wide = type(small)(config)
    wide.tie_weights()  # skipped together with the random initialisation
    own = wide.state_dict()
    filler = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in small.state_dict().items():
            if ".mlp.gate_proj." in name or ".mlp.up_proj." in name:
                own[name].normal_(std=0.02, generator=filler)
                own[name][:old] = tensor
            elif ".mlp.down_proj." in name:
                own[name].zero_()
                own[name][:, :old] = tensor
            else:
                own[name].copy_(tensor)
    wide.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return sum(parameter.numel() for parameter in wide.parameters())
