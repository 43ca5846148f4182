"""Loads the model that is trained, and refuses what packed sequences cannot be trained with."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from asyncrl.trainer.errors import UnsupportedModelError
from asyncrl.wire.weights.pretrained import load_causal_lm


def load_model(model_path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a causal language model from a directory or hub id, onto the CPU.

    Raises:
        UnsupportedModelError: transformers cannot load it, or it does not take an attention
            function.
    """
    try:
        model: Any = load_causal_lm(model_path, dtype)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(f"cannot load the model {model_path}: {error}") from error
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{model_path}: {type(model).__name__} does not take an attention function "
            "(transformers' attention interface), so packed sequences would see each other; "
            "choose a model whose class sets _supports_attention_backend (Llama, Qwen, Mistral, "
            "Gemma, Phi, ... do)"
        )
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            f"{model_path}: {type(model).__name__} has layers of another kind than full or sliding "
            f"attention ({', '.join(sorted(kinds))}), which packed sequences cannot be trained with"
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{model_path}: {type(model).__name__} carries a recurrent state across the row, "
            "so packed sequences would see each other; choose a transformer"
        )
    return model
