"""Learners that train an adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.rollout.trajectory import Trajectory
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.lora_config import LoraConfig
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.lora.adapter import Adapter, write_adapter
from asyncrl.trainer.model.model_loading import load_model

Groups = Callable[..., list[Trajectory]]
"""The fixture `group_of`."""
LORA = LoraConfig(rank=3, alpha=12)


def learner_of(model: str, **settings: Any) -> Learner:
    values: dict[str, Any] = {"device": "cpu", "learning_rate": 0.02, "lora": LORA}
    return Learner(TrainerConfig(**(values | settings)), model, group_size=4, seed=1)


def trained(learner: Learner, group_of: Groups, steps: int = 1) -> Learner:
    for step in range(learner.policy_version, learner.policy_version + steps):
        group = group_of(step, np.random.default_rng(step), version=step)
        learner.add_group(group, np.arange(4, dtype=np.float32))
        learner.step()
    return learner


def random_adapter(model: str, directory: Path) -> Path:
    """A PEFT directory of an adapter of `LORA` with which the policy is far from the model."""
    adapter = Adapter(load_model(model, torch.float32), LORA, torch.float32)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: 0.3 * torch.randn(one.shape, generator=generator) for name, one in adapter.tensors()
    }
    write_adapter(directory, tensors, adapter.settings(model))
    return directory
