"""Train with TRL's GRPOTrainer as a run's configuration says. Runs in TRL's own environment.

    python -m benchmarks.peers.trl_train CONFIG LOG [--vllm] [--micro-batch N] [--set KEY=VALUE ...]

Prompts are asked in asyncrl's order and scored by asyncrl's reward functions. The log holds the
steps (`benchmarks.peers.shared_data.StepLog`); its clock starts when TRL begins to train.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.run_config import load_config
from benchmarks.peers.shared_data import StepLog, mean, prompts_by_step, reward_of, task_of
from benchmarks.peers.trl_arguments import grpo_arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--micro-batch", type=int, default=0, help="samples; 0: all of a step")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    options = parser.parse_args()
    train(options)


def train(options: argparse.Namespace) -> None:
    if not options.vllm:
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
    arguments = grpo_arguments(
        config, micro_batch=options.micro_batch or samples, vllm=options.vllm
    )
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
