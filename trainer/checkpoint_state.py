"""What of a learner a checkpoint holds: the policy, and what is trained with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.optimizer.training_state import Shardings, TrainingState
from asyncrl.trainer.optimizer.update import Update
from asyncrl.trainer.scoring import Models

CENTRE = "advantage_centre"
"""`Stepping.centre`, among the state's values."""
_BASE = "base_weights"
"""Digest of the model that an adapter is of, among the state's values."""


def state_of(models: Models, update: Update) -> TrainingState:
    """The policy or its adapter, a critic if there is one, and a reference that moves.

    Args:
        models: of the learner.
        update: of the policy.
    """
    adapter = models.policy.adapter
    policy = models.policy.model if adapter is None else adapter.module()
    modules: dict[str, nn.Module] = {"policy": policy}
    optimizers: dict[str, Optimizer] = {"policy": update.optimizer}
    shardings = [update.sharding]
    if models.critic is not None:
        modules["critic"] = models.critic.module
        optimizers["critic"] = models.critic.update.optimizer
        shardings.append(models.critic.update.sharding)
    if models.reference is not None and models.reference.moves:
        modules["reference"] = models.reference.policy.model
    values: dict[str, Any] = {} if adapter is None else {_BASE: adapter.base_digest()}
    return TrainingState(modules, optimizers, values=values, sharding=Shardings(shardings))


def adapter_settings(policy: Policy, model_path: str) -> dict[str, Any] | None:
    """What a PEFT directory says of a policy's adapter; None: it has none."""
    return None if policy.adapter is None else policy.adapter.settings(model_path)


def check_base(directory: Path, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError if an adapter was saved for another model than the one it is now."""
    if saved.get(_BASE) != own.get(_BASE):
        raise CheckpointError(f"{directory} has an adapter of another model than model.path is now")


def check_reference(directory: Path, models: Models, own: str, saved: str) -> None:
    """Refuse another reference of the KL penalty, which is not part of a checkpoint, than before.

    Args:
        directory: of the checkpoint.
        models: of the learner.
        own: digest of the weights that it started from.
        saved: the same of the run that wrote the checkpoint; empty: not known.

    Raises:
        CheckpointError: the reference stays the model that training starts from, and that has
            changed since.
    """
    reference, adapter = models.reference, models.policy.adapter
    if reference is None or reference.moves or not saved or own == saved:
        return
    if adapter is not None and adapter.config.adapter is None:
        return  # it is the adapter's model, which `check_base` compares
    raise CheckpointError(
        f"{directory} is of a run that started from other weights than those of model.path now, "
        "which would be the reference of its KL penalty; set model.path to the model that the run "
        "started from"
    )
