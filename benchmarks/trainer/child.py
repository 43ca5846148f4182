"""One contender in a process of its own: trains on a workload's samples, reports times and memory.

    python -m benchmarks.trainer.child {asyncrl|plain|trl} FOLDER STEPS [KEY=VALUE ...]

FOLDER holds a model and samples.json. Prints one JSON object. KEY=VALUE are settings of asyncrl's
trainer. All contenders train float32 with AdamW and GRPO's loss of the same advantages.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

_RATE = 1e-6
_TEMPERATURE = 1.0


def main() -> None:
    contender, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    settings = {
        key: yaml.safe_load(value) for key, _, value in (a.partition("=") for a in sys.argv[4:])
    }
    groups = json.loads((folder / "samples.json").read_text())["groups"]
    make: dict[str, Callable[..., Callable[[], float]]] = {
        "asyncrl": _asyncrl, "plain": _plain, "trl": _trl
    }  # fmt: skip
    step = make[contender](str(folder), groups, **settings)
    loaded = _peak()
    seconds, cpu_seconds, norms = [], [], []
    for _ in range(steps):
        began, cpu = time.perf_counter(), time.process_time()
        norms.append(step())
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu)
    print(json.dumps({
        "seconds": seconds, "cpu_seconds": cpu_seconds, "norms": norms,
        "loaded_bytes": loaded, "peak_bytes": _peak(),
    }))  # fmt: skip


def _peak() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _asyncrl(path: str, groups: list[dict[str, Any]], **settings: Any) -> Callable[[], float]:
    from asyncrl.rollout.trajectory import Provenance, SampleId, TrajectoryBuilder
    from asyncrl.trainer.base.config import TrainerConfig
    from asyncrl.trainer.learner import Learner
    from asyncrl.trainer.model.memory_estimate import keep_freed_memory

    keep_freed_memory()  # as a run's trainer does on a CPU
    config = TrainerConfig(learning_rate=_RATE, device="cpu", correction="none", **settings)
    learner = Learner(config, path, group_size=len(groups[0]["responses"]), seed=0)
    made = []
    for index, group in enumerate(groups):
        trajectories = []
        for sample, response in enumerate(group["responses"]):
            tokens = np.array(response, np.int32)
            guess = np.full(len(tokens), -np.log(learner.policy.vocab_size), np.float32)
            builder = TrajectoryBuilder(
                SampleId(index, sample), f"p{index}", np.array(group["prompt"], np.int32)
            )
            builder.append(
                tokens=tokens,
                logprobs=guess,
                topk_ids=tokens[:, None],
                topk_logprobs=guess[:, None],
                noise_seeds=np.full(len(tokens), 17, np.uint64),
                provenance=np.full(len(tokens), Provenance.SAMPLED, np.uint8),
                policy_version=0,
            )
            trajectories.append(builder.finish("stop"))
        made.append((trajectories, np.array(group["rewards"], np.float32)))

    def step() -> float:
        for trajectories, rewards in made:
            learner.add_group(trajectories, rewards)
        return learner.step().learning.grad_norm

    return step


def _advantages(group: dict[str, Any]) -> torch.Tensor:
    rewards = torch.tensor(group["rewards"], dtype=torch.float32)
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def _padded(group: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`[G, P]` prompts, `[G, L]` responses padded at the end, `[G, L]` bool where there is one."""
    responses = [torch.tensor(one) for one in group["responses"]]
    ids = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True)
    lengths = torch.tensor([len(one) for one in responses])
    prompt = torch.tensor(group["prompt"]).expand(len(responses), -1)
    return prompt, ids, torch.arange(ids.shape[1]) < lengths[:, None]


def _plain(path: str, groups: list[dict[str, Any]]) -> Callable[[], float]:
    """What one writes first: a padded group at a time, all logits, log_softmax, gather."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.0, fused=True)
    total = sum(len(one) for group in groups for one in group["responses"])

    def step() -> float:
        for group in groups:
            prompt, ids, mask = _padded(group)
            logits = model(
                input_ids=torch.cat([prompt, ids], 1),
                attention_mask=torch.cat([torch.ones_like(prompt), mask.long()], 1),
                use_cache=False,
            ).logits[:, prompt.shape[1] - 1 : -1]
            logprobs = torch.log_softmax(logits / _TEMPERATURE, -1)
            chosen = logprobs.gather(-1, ids[..., None])[..., 0]
            ratio = torch.exp(chosen - chosen.detach())
            loss = -(ratio * _advantages(group)[:, None] * mask).sum() / total
            del logits, logprobs
            loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return step


def _trl(path: str, groups: list[dict[str, Any]]) -> Callable[[], float]:
    """TRL's own loss (`GRPOTrainer.compute_loss`) and its arguments, on the given samples."""
    sys.modules["vllm"] = None  # type: ignore[assignment]  # TRL would import it: memory
    import tempfile

    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    names = {"pad_token": "a", "eos_token": "b", "unk_token": "a"}
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, names["unk_token"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    size = len(groups[0]["responses"])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to="none",
            per_device_train_batch_size=size, num_generations=size, beta=0.0, loss_type="dapo",
            gradient_checkpointing=False, temperature=_TEMPERATURE, learning_rate=_RATE,
            optim="adamw_torch_fused", disable_tqdm=True, max_steps=100,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * size),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.create_optimizer_and_scheduler(num_training_steps=100)
    trainer.current_gradient_accumulation_steps = 1  # the loss has the step's denominator
    trainer.model.train()
    total = torch.tensor(sum(len(one) for group in groups for one in group["responses"]))

    def step() -> float:
        for group in groups:
            prompt, ids, mask = _padded(group)
            inputs = {
                "prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt),
                "completion_ids": ids, "completion_mask": mask.long(),
                "advantages": _advantages(group), "num_items_in_batch": total,
            }  # fmt: skip
            trainer.compute_loss(trainer.model, inputs).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0))
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return norm

    return step


if __name__ == "__main__":
    main()
