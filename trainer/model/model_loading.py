"""Loads the model to train, and refuses models that cannot be trained packed."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from asyncrl.trainer.base.errors import UnsupportedModelError
from asyncrl.wire.weights.pretrained import load_causal_lm


def load_model(model_path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a causal language model from a directory or hub id, onto the CPU.

    Raises UnsupportedModelError if it cannot be loaded, or does not take an attention function.
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
            f"attention ({', '.join(sorted(kinds))}); packed sequences cannot be trained with them"
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{model_path}: {type(model).__name__} has a recurrent state, through which packed "
            "sequences would see each other; choose a transformer"
        )
    return model


def multiply_in_tf32(models: Iterable[nn.Module]) -> None:
    """Make this process multiply float32 matrices in TensorFloat-32, except for rotary angles.

    transformers computes an angle as a matrix product of a position and a frequency. In the 11
    significant bits of TensorFloat-32, positions from 2,049 on would be rounded.
    """
    torch.set_float32_matmul_precision("high")
    for module in (one for model in models for one in model.modules()):
        if any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            module.forward = _in_full_float32(module.forward)


def _in_full_float32(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def computed(*arguments: Any, **more: Any) -> Any:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            return forward(*arguments, **more)
        finally:
            torch.set_float32_matmul_precision(before)

    return computed
