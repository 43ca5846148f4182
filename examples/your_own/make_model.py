"""Create a small random Llama with a tokenizer, as a stand-in for your own model.

    python examples/your_own/make_model.py /tmp/tiny-llama

It knows nothing. It shows that any HF model directory with a tokenizer will do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def make(directory: Path) -> None:
    """Write config, weights and tokenizer files to `directory`."""
    characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,?!'-+*/=:"
    names = ["<unk>", "<end>", *characters]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(names),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    model.save_pretrained(directory)
    fast.save_pretrained(directory)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
