"""Models that are made in a moment."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.initialization import no_init_weights

from asyncrl.tasks.builtin.warm_start_recipe import MINIATURE
from asyncrl.tasks.model import ensure_builtin_model


def widen(source: str, target: Path, intermediate_size: int, seed: int = 0) -> int:
    """Write a copy of a gated-MLP model that costs more, and return its parameter count.

    Its larger `intermediate_size` has random gate and up rows and zero columns in the down
    projection, so the outputs are the same. The random part depends on the seed alone.
    """
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


SMOKE_START = MINIATURE


def smoke_settings(folder: Path, task: Literal["arithmetic", "agent"] = "arithmetic") -> list[str]:
    """Of a run whose steps take a moment, with the built-in model in miniature."""
    made = ensure_builtin_model(folder / "smoke-model", None, replace(SMOKE_START, task=task))
    few = ("scheduler.groups_per_step=4", "scheduler.group_size=4", "engine.slots=16")
    return [f"model.path={made}", *few]


def slow_settings(folder: Path) -> list[str]:
    """Of a run whose steps last a third of a second at least, nearly all of which it waits."""
    return [*smoke_settings(folder), "rewards.functions=[{name: benchmarks/slow_reward.py:score}]"]


def qwen3(vocabulary: int, hidden: int = 64, layers: int = 2, *, seed: int = 0, **more: Any) -> Any:
    """A Qwen3 with random weights as transformers makes them, in float32; no token is special.

    Heads have 64 numbers, every second one has keys and values; `more` are other settings.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    settings = {
        "intermediate_size": 3 * hidden,
        "num_attention_heads": max(1, hidden // 64),
        "num_key_value_heads": max(1, hidden // 128),
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "eos_token_id": None,
        "bos_token_id": None,
        **more,
    }
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, **settings
    )
    return Qwen3ForCausalLM(config).float().eval()


def random_qwen3(
    seed: int,
    vocabulary: int,
    *,
    max_length: int = 64,
    embedding_scale: float = 0.3,
    weight_scale: float = 0.4,
) -> Any:
    """A random Qwen3 whose next-token distributions are neither flat nor certain.

    The scales are standard deviations of the (tied) embeddings and of the other matrices.
    """
    model = qwen3(
        vocabulary, 32, 2, seed=seed, intermediate_size=64, num_attention_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention supports
        max_position_embeddings=max_length,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                scale = embedding_scale if "embed" in name else weight_scale
                parameter.copy_(torch.randn_like(parameter) * scale)
    return model
