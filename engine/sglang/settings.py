"""Settings that the generator's process passes to SGLang's processes.

`asyncrl.engine.sglang.worker.main` gets a `ServerSettings` on its command line. SGLang starts its
scheduler processes and passes them nothing of ours, so `WorkerSettings` travel in the environment,
which they inherit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from asyncrl.engine.config import EngineConfig
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
    """The settings from which SGLang's `ServerArgs` are made."""

    folder: str
    """Private to this engine; removed when its generator has ended."""
    model_path: str
    seed: int
    max_model_len: int
    """Most tokens of a request, including room for drafts."""
    draft_tokens: int
    """Most draft tokens of a request in a step; 0: no speculation."""
    config: dict[str, Any]
    """An `EngineConfig` as JSON."""

    @property
    def engine(self) -> EngineConfig:
        """The settings of the engine, or ValueError."""
        return EngineConfig.model_validate(self.config)
