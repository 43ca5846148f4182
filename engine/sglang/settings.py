"""Settings that the generator's process passes to SGLang's processes.

`asyncrl.engine.sglang.worker.main` gets a `ServerSettings` on its command line. SGLang starts its
scheduler processes and passes them nothing of ours, so `WorkerSettings` travel in the environment,
which they inherit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, Self

import msgspec

from asyncrl.engine.remote.extras import DrafterSettings

VARIABLE = "ASYNCRL_SGLANG_SETTINGS"
"""Environment variable with a `WorkerSettings` as JSON."""
CPU_ATTENTION = "asyncrl_torch"
"""Name of `worker.tree_attention` in SGLang's `attention_backend`."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and settings of our part of the scheduler process."""

    requests: str
    """Address of the client's PUSH socket, from which `ToWorker` messages come. The client binds
    both sockets before it starts the process; rank 0 connects."""
    outputs: str
    """Address of the client's PULL socket, to which `ToClient` messages go."""
    parent: int
    """Id of the generator's process. SGLang's processes exit when it has ended."""
    top_k: int
    """K of the reported lists (engine.top_k_logprobs); 0: none is reported."""
    logits_bytes: int
    """Memory that drawing and scoring may hold at once (engine.logits_mib)."""
    stage_on_device: bool
    """True if new weights wait on the model's device (engine.weight_staging)."""
    steps_per_message: int
    drafting: DrafterSettings | None = None

    def to_environment(self) -> dict[str, str]:
        """Return the variable that SGLang's processes read."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read what `to_environment` made, or raise KeyError."""
        return msgspec.json.decode(environment[VARIABLE], type=cls)


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
