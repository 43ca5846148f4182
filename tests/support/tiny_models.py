"""Random models small enough to enumerate: a vocabulary of ten tokens, two layers.

Weights are scaled up, so that distributions are far from uniform and depend on the context. The
models of `benchmarks.tiny_models` have the sizes that vLLM's attention needs; these are smaller,
and there is a Llama.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 10
STOP = 9
"""The stop token of the tests."""


def sizes() -> dict[str, Any]:
    """Of a model's configuration."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": STOP,
        "pad_token_id": None,
    }


def make_qwen3(seed: int = 0, *, scale: float = 6.0, **changes: Any) -> Any:
    """A random Qwen3 with tied embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**(sizes() | {"tie_word_embeddings": True} | changes))
    return with_random_weights(Qwen3ForCausalLM, config, seed, scale)


def make_llama(seed: int = 0, *, scale: float = 6.0, **changes: Any) -> Any:
    """A random Llama with separate output embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**(sizes() | {"tie_word_embeddings": False} | changes))
    return with_random_weights(LlamaForCausalLM, config, seed, scale)


def with_random_weights(kind: Any, config: Any, seed: int, scale: float) -> Any:
    """A model of this class and configuration; matrices are scaled up."""
    import torch

    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale * (1.5 if "lm_head" in name else 1.0))
    return model


def save(model: Any, path: Path) -> str:
    """Save in HF format; returns the directory as a string."""
    model.save_pretrained(path)
    return str(path)
