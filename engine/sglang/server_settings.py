"""Settings that SGLang is started with, for `asyncrl.engine.sglang.worker.main`."""

from __future__ import annotations

from typing import Literal

import msgspec

CPU_ATTENTION = "asyncrl_torch"
"""Name of `worker.tree_attention` in SGLang's `attention_backend`."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an `EngineConfig` that becomes SGLang's `ServerArgs`."""

    folder: str
    """Private to this engine; removed when its generator has ended."""
    model_path: str
    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "float32", "bfloat16"]
    """"auto": float32 on a CPU, bfloat16 on a GPU."""
    logits_dtype: Literal["auto", "float32", "model"]
    """"auto": float32 on a GPU."""
    batch_invariant: bool
    """Only on a GPU."""
    seed: int
    max_model_len: int
    """Most tokens of a request, including room for drafts."""
    slots: int
    prefill_tokens: int | None
    """Prompt tokens of a step. None: depends on the device."""
    kv_cache_gib: float | None
    """None: 0.5 on a CPU, on a GPU what `mem_fraction_static` leaves."""
    mem_fraction_static: float
    prefix_caching: bool
    draft_tokens: int
    """Most draft tokens of a request in a step; 0: no speculation."""
    tensor_parallel_size: int
    step_seconds: float
    """SGLang ends itself when a step takes longer."""
    log_level: str
