"""What learners of one model are compared with: transformers itself, in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.learner import Learner

Group = tuple[list[Trajectory], np.ndarray]
GroupOf = Callable[..., list[Trajectory]]
RATE, EPSILON = 1e-2, 0.1
COMMON = {
    "dtype": "float64",
    "device": "cpu",
    "learning_rate": RATE,
    "adam_epsilon": EPSILON,  # large, so that AdamW does not magnify rounding
    "max_grad_norm": float("inf"),
    "micro_batch_tokens": 40,
}


def make_learner(path: str, **settings: Any) -> Learner:
    return Learner(TrainerConfig.model_validate(COMMON | settings), path, group_size=4, seed=1)


def near_logprobs(path: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Behaviour log-probabilities not far from the model's, so that some ratios are clipped."""
    model = plain_model(path)
    rng = np.random.default_rng(9)

    def logprobs(prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            own = plain_logprobs(model, prompt, tokens).numpy()
        return np.minimum(own + rng.normal(0, 0.25, len(tokens)), -0.01)

    return logprobs


def plain_model(path: str) -> Any:
    """The model with norms in float64, where transformers' own fall back to float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_norm, module)
    return model


def _norm(module: Any, x: Tensor) -> Tensor:
    mean = x.square().mean(-1, keepdim=True)
    return module.weight * x * torch.rsqrt(mean + module.variance_epsilon)


def make_batch(group_of: GroupOf, path: str, groups: int = 4) -> list[Group]:
    rng, near = np.random.default_rng(3), near_logprobs(path)
    made = [group_of(index, rng, longest=9, logprobs=near) for index in range(groups)]
    return [(group, rng.normal(size=4)) for group in made]


def plain_logprobs(model: Any, prompt: np.ndarray, tokens: np.ndarray) -> Tensor:
    row = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
    logits = model(input_ids=row[None]).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, row[len(prompt) :, None])[:, 0]
