"""Small random models and trajectories, made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from asyncrl.rollout.trajectory import Provenance, SampleId, Trajectory, TrajectoryBuilder
from asyncrl.trainer.model.packing import ATTENTION_NAME
from asyncrl.trainer.model.policy import Policy

VOCAB = 32
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _without_heads() -> dict[str, Any]:
    return {key: value for key, value in COMMON.items() if key != "head_dim"}


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=False),
    "mistral_window": lambda: transformers.MistralConfig(**COMMON, sliding_window=5),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128,
        bos_token_id=1, eos_token_id=2,
    ),
    "granite": lambda: transformers.GraniteConfig(
        **COMMON, logits_scaling=4.0, attention_multiplier=0.5
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON, attn_logit_softcapping=1.0, final_logit_softcapping=2.0, sliding_window=5,
        query_pre_attn_scalar=8,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON, sliding_window=5, layer_types=["sliding_attention", "full_attention"],
    ),
    "cohere": lambda: transformers.CohereConfig(**_without_heads(), logit_scale=0.25),
    "phi3": lambda: transformers.Phi3Config(**_without_heads()),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON, sliding_window=5, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        norm_topk_prob=True,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **_without_heads(), num_local_experts=4, num_experts_per_tok=2
    ),
    "olmo_clipped": lambda: transformers.OlmoConfig(**_without_heads(), clip_qkv=0.3),
    "smollm3": lambda: transformers.SmolLM3Config(**_without_heads(), no_rope_layers=[1, 0]),
    "glm4": lambda: transformers.Glm4Config(**COMMON),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**_without_heads(), "num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=4, n_routed_experts=4, n_group=2,
        topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **COMMON, num_local_experts=4, attention_chunk_size=8192, intermediate_size_mlp=48
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Directory of a small random model of a named architecture, made once."""
    made: dict[str, str] = {}

    def make(name: str) -> str:
        if name not in made:
            torch.manual_seed(7)
            model = transformers.AutoModelForCausalLM.from_config(
                ARCHITECTURES[name](), dtype=torch.float32
            )
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim >= 2:
                        parameter.normal_(0.0, 0.15)
                for name_of, sinks in model.named_parameters():
                    if name_of.endswith(".sinks"):
                        sinks.normal_()
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            (path / "tokenizer.json").write_text('{"kept": true}')
            made[name] = str(path)
        return made[name]

    return make


def make_group(
    group: int,
    rng: np.random.Generator,
    *,
    size: int = 4,
    longest: int = 14,
    version: int = 0,
    logprobs: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> list[Trajectory]:
    """A group of random answers to a random prompt; behaviour log-probabilities about -3."""
    prompt = rng.integers(0, VOCAB, rng.integers(1, 6)).astype(np.int32)
    out = []
    for sample in range(size):
        length = int(rng.integers(1, longest))
        tokens = rng.integers(0, VOCAB, length).astype(np.int32)
        behaviour = rng.normal(-3.5, 0.5, length)
        if logprobs is not None:
            behaviour = logprobs(prompt, tokens)
        builder = TrajectoryBuilder(SampleId(group, sample), f"p{group}", prompt)
        builder.append(
            tokens=tokens,
            logprobs=behaviour.astype(np.float32),
            topk_ids=tokens[:, None],
            topk_logprobs=behaviour.astype(np.float32)[:, None],
            noise_seeds=np.full(length, 17, np.uint64),
            provenance=np.full(length, Provenance.SAMPLED, np.uint8),
            policy_version=version,
        )
        out.append(builder.finish("stop"))
    return out


@pytest.fixture
def group_of() -> Callable[..., list[Trajectory]]:
    """`make_group`, for tests (conftest modules cannot be imported)."""
    return make_group


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


_FIT: dict[tuple[Any, ...], tuple[bool, bool]] = {}
"""By model and settings: whether a policy has its head, and its fused layers."""


@pytest.fixture
def _checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is compared with its packed self once for tests that are about something else."""
    check = Policy._check_packing

    def check_once(policy: Policy, path: str) -> None:
        settings = policy.temperature, policy.truncation, policy._recomputes, policy.adapter is None
        key = path, type(policy), policy._compute_dtype, policy._fused is None, *settings
        if key not in _FIT:
            check(policy, path)
            _FIT[key] = policy._head is not None, policy._fused is not None
            return
        has_head, has_fused = _FIT[key]
        policy.model.eval()
        policy.model.set_attn_implementation(ATTENTION_NAME)
        policy._head = policy._head if has_head else None
        policy._fused = policy._fused if has_fused else None

    monkeypatch.setattr(Policy, "_check_packing", check_once)


@pytest.fixture
def tokenizer_kept() -> Callable[[Path], bool]:
    """Whether a model directory has the tokenizer file of the original."""
    return lambda path: (path / "tokenizer.json").read_text() == '{"kept": true}'
