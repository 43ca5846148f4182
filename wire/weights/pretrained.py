"""Causal language models of transformers, loaded or built by one thread at a time.

While transformers loads a model, `PreTrainedModel.tie_weights` does nothing, for the whole process.
Of two threads that load at once, the later one takes that for the method and puts it back when it
ends: from then on no model ties its weights, and an output layer that a checkpoint leaves out is
made up (transformers 5.19, `initialization.no_tie_weights`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_lock = threading.Lock()


def load_causal_lm(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model of a directory or hub id, on the CPU.

    Raises OSError, ValueError, KeyError, RuntimeError, ImportError or SafetensorError.
    """
    from transformers import AutoModelForCausalLM

    with _lock:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=False
        )
    return model


def causal_lm_without_weights(config: Any) -> PreTrainedModel:
    """Build a model on the meta device. Raises OSError, ValueError, KeyError of transformers."""
    from transformers import AutoModelForCausalLM

    with _lock, torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model
