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


def make_special(name: str, seed: int = 0, *, window: int = 5) -> Any:
    """A random model whose attention torch's kernels do not compute as it is.

    `gemma2` has capped scores and logits and a window in every second layer, `gpt_oss` sinks,
    experts and such windows, `mistral` a window in each layer.
    """
    import torch
    import transformers

    own: dict[str, dict[str, Any]] = {
        "gemma2": {
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 8,
        },
        "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "mistral": {},
    }
    kind = {"gemma2": "Gemma2", "gpt_oss": "GptOss", "mistral": "Mistral"}[name]
    config = getattr(transformers, f"{kind}Config")(
        **(sizes() | {"sliding_window": window} | own[name])
    )
    config._attn_implementation = "eager"  # transformers' others leave caps and sinks out
    model = with_random_weights(getattr(transformers, f"{kind}ForCausalLM"), config, seed, 6.0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".sinks"):
                parameter.normal_()
            elif "experts" in parameter_name:
                parameter.normal_(0.0, 0.3)
    return model


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
