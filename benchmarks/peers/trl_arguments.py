"""TRL's arguments for the training that a run's configuration describes. Imports no TRL.

Everything that determines what is learned is taken from the configuration. What only determines
speed is set to what was fastest for TRL here: no gradient checkpointing unless the run has it, no
KL model, no logging, one pass over each batch (then TRL takes the old log-probabilities from the
training pass and saves a forward pass), fused AdamW.
"""

from __future__ import annotations

from typing import Any

from asyncrl.config.run_config import RunConfig

LOSSES = {"token": "dapo", "sequence": "grpo"}
"""`trainer.loss_normalization` to TRL's `loss_type`: weights per token or per sample."""
SCALES = {"none": "none", "std": "group"}
"""`trainer.advantage_normalization` to TRL's `scale_rewards`."""


class NotComparableError(Exception):
    """The configuration asks for something that TRL computes differently. The message says what."""


def grpo_arguments(config: RunConfig, *, micro_batch: int, vllm: bool = False) -> dict[str, Any]:
    """Keyword arguments of `trl.GRPOConfig`, without the output folder."""
    trainer, sampling = config.trainer, config.sampling
    samples = config.scheduler.groups_per_step * config.scheduler.group_size
    if trainer.algorithm != "grpo":
        raise NotComparableError(f"trainer.algorithm {trainer.algorithm!r}: only grpo is compared")
    if trainer.loss_normalization not in LOSSES:
        raise NotComparableError(
            f"trainer.loss_normalization {trainer.loss_normalization!r}: TRL has no such loss"
        )
    if trainer.learning_rate_schedule != "constant" or trainer.warmup_steps:
        raise NotComparableError("a learning rate that changes is not compared")
    if sampling.stop:
        raise NotComparableError("sampling.stop: TRL has no stop strings")
    if samples % micro_batch:
        raise NotComparableError(f"{samples} samples a step are no multiple of {micro_batch}")
    learned = {
        "max_steps": config.run.steps,
        "seed": config.run.seed,
        "num_generations": config.scheduler.group_size,
        "max_completion_length": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or None,
        "learning_rate": trainer.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": trainer.betas[0],
        "adam_beta2": trainer.betas[1],
        "adam_epsilon": trainer.adam_epsilon,
        "weight_decay": trainer.weight_decay,
        "max_grad_norm": trainer.max_grad_norm,
        "beta": trainer.kl_coefficient,
        "epsilon": trainer.clip_ratio_low,
        "epsilon_high": trainer.clip_ratio_high,
        "loss_type": LOSSES[trainer.loss_normalization],
        "scale_rewards": SCALES[trainer.advantage_normalization],
        "mask_truncated_completions": False,
        "num_iterations": 1,
        "shuffle_dataset": False,
        "bf16": False,
    }
    speed: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": samples // micro_batch,
        "gradient_checkpointing": bool(trainer.gradient_checkpointing),
        "optim": "adamw_torch_fused",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if vllm:
        speed |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": config.engine.max_model_len,
            "vllm_importance_sampling_correction": False,
        }
    return learned | speed
