"""The trainer's settings. Light to import: no torch."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from trainer.algorithms.registry import known_algorithms
from wire.limits import MAX_STEPS, MAX_THREADS, MAX_TOKENS


class TrainerConfig(BaseModel):
    """How groups of trajectories become optimizer steps.

    Each batch is passed over exactly once. Then `proximal_policy`, `importance_cap` and
    `clip_ratio_*` decide what the importance ratio does; `trainer.algorithms.grpo` has the
    equations.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    algorithm: str = "grpo"
    """Registered algorithm: grpo, or reinforce (leave-one-out baseline)."""
    learning_rate: float = Field(default=1e-6, gt=0, le=1)
    """Peak learning rate of AdamW; 1e-6 suits 1B-32B parameters."""
    learning_rate_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Shape after warm-up; cosine and linear decay to the minimum."""
    learning_rate_minimum: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at which cosine and linear end."""
    warmup_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Optimizer steps over which the learning rate rises linearly."""
    schedule_steps: int | None = Field(default=None, gt=0, le=MAX_STEPS)
    """Step at which cosine and linear reach the minimum; unset: run.steps."""
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """AdamW's decoupled weight decay, on matrices only (not norms and biases)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decays."""
    adam_epsilon: float = Field(default=1e-8, gt=0, le=1)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The global gradient norm is clipped to this; .inf turns it off."""

    proximal_policy: Literal["current", "behaviour"] = "current"
    """current: decoupled objective with truncated importance weights; a single pass clips nothing.
    behaviour: PPO's clipped ratio against the policy that drew the tokens."""
    importance_cap: float = Field(default=2.0, ge=1, le=1e6)
    """Largest importance weight of a token. current: the weight is truncated to it; behaviour:
    PPO's dual clip for negative advantages."""
    clip_ratio_low: float = Field(default=0.2, gt=0, le=1)
    """PPO clips the ratio below 1 - this (proximal: behaviour)."""
    clip_ratio_high: float = Field(default=0.2, gt=0, le=1e6)
    """PPO clips the ratio above 1 + this; DAPO's clip-higher uses 0.28."""
    loss_normalization: Literal["token", "sequence"] = "token"
    """token: every response token of the step has the same weight (DAPO). sequence: every sample
    has the same weight, its tokens are averaged first (GRPO)."""
    advantage_normalization: Literal["std", "none"] = "std"
    """std: divide by the group's standard deviation (GRPO). none: do not (Dr. GRPO)."""
    skip_zero_variance_groups: bool = True
    """Do not compute groups whose advantages are all 0. They still count in the denominator, so the
    gradient is the same; their tokens are missing from the means of entropy, ratio and mismatch.
    Without effect while kl_coefficient > 0."""
    kl_coefficient: float = Field(default=0.0, ge=0, le=1000)
    """Weight of the KL penalty towards the initial model; with 0 no second model is loaded."""

    micro_batch_tokens: int = Field(default=8192, gt=0, le=MAX_TOKENS)
    """Prompt + response tokens of one forward pass; a longer sequence gets its own."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Compute type. Under bfloat16 (autocast) parameters and Adam stay float32."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda. `launcher.gpus` says which GPU."""
    threads: int | None = Field(default=None, gt=0, le=MAX_THREADS)
    """Torch threads of the trainer's process; unset: torch decides."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third slower."""
    fused: bool = True
    """On a CPU, compute float32 Llama-like models in fused layers instead of transformers' own."""
    checkpoint_every: int = Field(default=50, gt=0, le=MAX_STEPS)
    """Optimizer steps between checkpoints."""
    keep_checkpoints: int = Field(default=2, gt=0, le=MAX_STEPS)
    """How many of the newest checkpoints are kept."""

    @field_validator("algorithm")
    @classmethod
    def _algorithm_is_known(cls, value: str) -> str:
        if value not in known_algorithms():
            raise ValueError(f"{value!r} is not registered; known: {', '.join(known_algorithms())}")
        return value

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, value: str) -> str:
        if value not in ("auto", "cpu", "cuda"):
            raise ValueError("must be auto, cpu or cuda; launcher.gpus says which GPUs a run uses")
        return value

    @field_validator("betas")
    @classmethod
    def _betas_below_one(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"both betas must lie in [0, 1), got {value}")
        return value

    @model_validator(mode="after")
    def _schedule_is_complete(self) -> Self:
        if self.schedule_steps is not None and self.schedule_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule_steps ({self.schedule_steps}) must be greater than "
                f"warmup_steps ({self.warmup_steps})"
            )
        if self.learning_rate_minimum > self.learning_rate:
            raise ValueError(
                f"learning_rate_minimum ({self.learning_rate_minimum}) is above learning_rate "
                f"({self.learning_rate})"
            )
        return self
