"""Train with TRL's GRPOTrainer as a run's configuration says. Runs in TRL's own environment.

    python -m benchmarks.peers.trl_train CONFIG LOG [--micro-batch N] [--set KEY=VALUE ...]

Prompts are asked in asyncrl's order and scored by asyncrl's reward functions. The log holds the
steps (`benchmarks.peers.shared_data.StepLog`); its clock starts when TRL begins to train.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.run_config import RunConfig, load_config
from benchmarks.peers.shared_data import StepLog, mean, prompts_by_step, reward_of, task_of

LOSSES = {"token": "dapo", "sequence": "grpo"}
"""`trainer.loss_normalization` to TRL's `loss_type`: weights per token or per sample."""
SCALES = {"none": "none", "std": "group"}
"""`trainer.advantage_normalization` to TRL's `scale_rewards`."""


class NotComparableError(Exception):
    """The configuration asks for something that TRL computes differently. The message says what."""


def grpo_arguments(config: RunConfig, *, micro_batch: int) -> dict[str, Any]:
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
    return learned | speed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--micro-batch", type=int, default=0, help="samples; 0: all of a step")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    options = parser.parse_args()
    train(options)


def train(options: argparse.Namespace) -> None:
    sys.modules["vllm"] = None  # type: ignore[assignment]  # TRL would import it: memory
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config = load_config(options.config, tuple(options.settings))
    task, reward = task_of(config), reward_of(config)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    asked = [p for prompts in prompts_by_step(config, task, model) for p in prompts]
    by_id = {prompt.prompt_id: prompt for prompt in asked}
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    assert (tokenizer.eos_token_id,) == tuple(task.stop_tokens)
    log = StepLog(options.log)
    found: dict[str, Any] = {}

    def rewards(completion_ids: list[list[int]], prompt_id: list[str], **_: Any) -> list[float]:
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=False)
        values = [reward(by_id[i], text) for i, text in zip(prompt_id, texts, strict=True)]
        found.update(reward=mean(values), tokens=sum(map(len, completion_ids)))
        return values

    class Log(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            log.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            log.add(found["reward"], found["tokens"])

    samples = config.scheduler.groups_per_step * config.scheduler.group_size
    arguments = grpo_arguments(config, micro_batch=options.micro_batch or samples)
    rows = [{"prompt": p.text, "prompt_id": p.prompt_id} for p in asked]
    for prompt in asked[:64]:
        ids = tokenizer(text=[prompt.text])["input_ids"][0]
        assert ids == prompt.tokens.tolist(), "TRL must read the same tokens"
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[rewards],
            args=GRPOConfig(output_dir=folder, **arguments),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Log()],
        )
        trainer.train()


if __name__ == "__main__":
    main()
