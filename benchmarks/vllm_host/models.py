"""The random models of this benchmark."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.tiny_models import random_qwen3

VOCABULARY = 32_000


def tiny_model(path: Path, max_length: int) -> None:
    """A model that takes no time: two layers, 64 tokens. The host is all there is."""
    random_qwen3(1, 64, max_length=max_length).save_pretrained(path)


def wide_model(path: Path, max_length: int) -> None:
    """A model with a real vocabulary: 43 M parameters, of which the head has 16 M.

    The scale of its embeddings gives the 64 most probable tokens most of the mass, as in a language
    model: how many tokens are drawn from outside them decides what a draw costs.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(2)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=512,
            num_hidden_layers=8,
            intermediate_size=1536,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=max_length,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
        )
    )
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0.0, 0.25)
    model.save_pretrained(path)
