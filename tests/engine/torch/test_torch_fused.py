"""The fused forward pass: transformers' numbers, for the families that it is written for."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from new_weights import swap_weights
from tiny_models import VOCAB, save, sizes, with_random_weights
from torch_cores import check_against_hf, core_of, mixed_requests, run, texts_of
from tree_sources import RandomTrees

from asyncrl.engine.errors import EngineStartError
from asyncrl.engine.torch.cpu import fused_model as fused
from asyncrl.engine.torch.model import SlotModel, load_model
from asyncrl.engine.torch.slots import SlotCache
from asyncrl.rollout.cpu import why_not_fused

LLAMA_3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen2, biases of queries, keys and values": ("Qwen2", {"head_dim": 8}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "llama, all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3, scaled angles": ("Llama", {"rope_parameters": LLAMA_3}),
    "one key head": ("Llama", {"num_key_value_heads": 1}),
}
PLAIN: dict[str, tuple[str, dict[str, Any], str]] = {
    "another family": ("Gemma", {}, "GemmaForCausalLM is not one of Llama, Mistral"),
    "another activation": ("Llama", {"hidden_act": "gelu"}, "activation is 'gelu'"),
    "angles by length": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}},
        "rotary embedding is 'dynamic'",
    ),
}


def make(family: str, changes: dict[str, Any], seed: int = 0) -> Any:
    config = getattr(transformers, f"{family}Config")(**(sizes() | changes))
    model = with_random_weights(getattr(transformers, f"{family}ForCausalLM"), config, seed, 5.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # biases are 0 and norms 1 otherwise
                parameter.add_(torch.randn_like(parameter), alpha=0.3 if "bias" in name else 0.1)
    return model


def load(path: str, *, threads: int = 1, **options: Any) -> SlotModel:
    torch.set_num_threads(threads)
    try:
        return load_model(
            path, slots=8, max_len=96, device=torch.device("cpu"), dtype=torch.float32, **options
        )
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("family", FUSED)
def test_the_fused_pass_gives_transformers_numbers(family: str, tmp_path: Path) -> None:
    """Prefills, siblings, decoding, chains and trees, and weights installed under the requests."""
    path = save(make(*FUSED[family]), tmp_path / "old")
    model = load(path)
    assert model._fused is not None
    core = core_of(model, RandomTrees(VOCAB))
    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    asked = mixed_requests(12)
    for one, chunks in zip(asked, run(core, asked).values(), strict=True):
        check_against_hf(plain, one, chunks)
    other = make(*FUSED[family], seed=1)
    swap_weights(core, other.state_dict().items(), 1)
    for one, chunks in zip(asked, run(core, asked).values(), strict=True):
        check_against_hf(other, one, chunks)


@pytest.mark.parametrize("case", PLAIN)
def test_other_models_run_through_transformers(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, changes, reason = PLAIN[case]
    path = save(make(family, changes), tmp_path)
    with caplog.at_level("INFO", "asyncrl.engine.torch.model"):
        model = load(path)
    assert model._fused is None
    assert reason in caplog.text
    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    asked = mixed_requests(6)
    for one, chunks in zip(
        asked, run(core_of(model, RandomTrees(VOCAB)), asked).values(), strict=True
    ):
        check_against_hf(plain, one, chunks)


def test_fused_or_not_the_tokens_are_the_same(tiny_qwen3: str) -> None:
    quick, plain = load(tiny_qwen3), load(tiny_qwen3, fused=False)
    assert (quick._fused is None, plain._fused is None) == (False, True)
    asked = mixed_requests(12)
    texts = [texts_of(run(core_of(m, RandomTrees(VOCAB)), asked)) for m in (quick, plain)]
    assert texts[0] == texts[1]


def test_large_layers_are_left_to_several_threads(tiny_llama: str) -> None:
    assert load(tiny_llama, threads=2)._fused is not None
    config = transformers.LlamaConfig(
        **(sizes() | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1})
    )
    model = transformers.LlamaForCausalLM(config)
    assert why_not_fused(model, threads=1) is None
    assert why_not_fused(model, threads=2) == "its layers are large enough for 2 threads"
    assert "bfloat16" in str(why_not_fused(model.bfloat16(), threads=1))


def test_a_fused_pass_that_differs_does_not_start(
    tiny_qwen3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fused.forward

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        arguments[-1][:] *= 1.02  # the logits

    monkeypatch.setattr(fused, "forward", wrong)
    with pytest.raises(EngineStartError, match=r"fused forward pass .*engine\.torch\.fused: false"):
        load(tiny_qwen3)


def test_slots_are_freed_before_those_of_all_layers_are_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a start would need twice the memory of the KV slots."""
    cache = SlotCache(2, 4)
    cache.keys = [torch.ones(2, 1, 4, 3) for _ in range(3)]
    cache.values = [torch.ones(2, 1, 4, 3) for _ in range(3)]
    of_layers = [[weakref.ref(one) for one in stored] for stored in (cache.keys, cache.values)]
    zeros = torch.zeros

    def allocate(*args: Any, **options: Any) -> torch.Tensor:
        assert not any(layer() is not None for layer in of_layers.pop(0))
        return zeros(*args, **options)

    monkeypatch.setattr(torch, "zeros", allocate)
    keys, values = cache.join_layers()
    assert not of_layers
    for joined, stored in ((keys, cache.keys), (values, cache.values)):
        assert joined.shape == (3, 2, 1, 4, 3)
        stored[1][:] = 7.0
        assert (joined[1] == 7.0).all()
        assert not joined[[0, 2]].any()
