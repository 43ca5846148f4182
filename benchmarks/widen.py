"""Make a small trained model cost what a big one costs, without changing what it says.

Copies it into one with a much larger `intermediate_size`: random gate and up rows for the new
part, zero columns in the down projection. Every output is the same, every product the big one's.
The random part depends on the seed alone, so that two versions of a model, widened alike, differ
only in what was trained.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.initialization import no_init_weights


def widen(source: str, target: Path, intermediate_size: int, seed: int = 0) -> int:
    """Write the widened copy of a gated-MLP model (Qwen, Llama) and return its parameter count.

    Raises:
        ValueError: the model is as wide already.
    """
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    old = int(small.config.intermediate_size)
    if intermediate_size <= old:
        raise ValueError(f"intermediate_size {intermediate_size} is not above the model's {old}")
    config = type(small.config).from_dict(
        small.config.to_dict() | {"intermediate_size": intermediate_size}
    )
    with no_init_weights():
        wide = type(small)(config)
    wide.tie_weights()  # left out along with the random numbers
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
