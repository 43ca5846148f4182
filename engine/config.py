"""Settings of a generator's engine, and how it draws tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.protocol import SamplingParams
from engine.torch.config import TorchConfig
from engine.vllm.config import VllmConfig

EngineKind = Literal["torch", "vllm", "sglang"]
DType = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]


class SamplingConfig(BaseModel):
    """How rollouts are drawn; the distribution after these settings is the policy."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Divides the logits. 0 (greedy) is refused: it has no behaviour probability."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of most probable tokens whose mass reaches this."""
    max_tokens: int = Field(default=256, ge=1)
    """Most tokens of a response."""

    def params(
        self, *, stop_tokens: tuple[int, ...], top_k_logprobs: int, seed: int | None
    ) -> SamplingParams:
        """The same as one request's parameters."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop_tokens=stop_tokens,
            top_k_logprobs=top_k_logprobs,
            seed=seed,
        )


class EngineConfig(BaseModel):
    """Which engine generates, and within what bounds."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: EngineKind = "torch"
    """torch: embedded, any HF causal LM. vllm. sglang: not yet."""
    slots: int = Field(default=64, ge=1)
    """Requests that run at once."""
    max_model_len: int = Field(default=1024, ge=2)
    """Most tokens of prompt and response together."""
    dtype: DType = "auto"
    """Of weights and KV. auto: float32 on a CPU, else bfloat16."""
    device: Device = "auto"
    """auto: a GPU where torch sees one."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the engine's process; None: torch's choice."""
    top_k_logprobs: int = Field(default=8, ge=0, le=64)
    """K: most probable tokens reported per position; a request may ask for fewer. What
    `scheduler.on_update: verify` can accept lies among them: with a large vocabulary at temperature
    1 use 64."""
    torch: TorchConfig = TorchConfig()
    """Used when kind=torch, and only then."""
    vllm: VllmConfig = VllmConfig()
    """Used when kind=vllm, and only then."""
