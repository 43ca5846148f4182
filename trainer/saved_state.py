"""What of a learner a checkpoint holds: the policy, and what is trained with it."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from trainer.ranks.update import Update
from trainer.scoring import Models
from trainer.training_state import Shardings, TrainingState


def state_of(models: Models, update: Update) -> TrainingState:
    """The policy, a critic if there is one, and a reference that is not the initial model.

    Args:
        models: of the learner.
        update: of the policy.
    """
    modules: dict[str, nn.Module] = {"policy": models.policy.model}
    optimizers: dict[str, Optimizer] = {"policy": update.optimizer}
    shardings = [update.sharding]
    if models.critic is not None:
        modules["critic"] = models.critic.module
        optimizers["critic"] = models.critic.update.optimizer
        shardings.append(models.critic.update.sharding)
    if models.reference is not None and models.reference.moves:
        modules["reference"] = models.reference.policy.model
    return TrainingState(modules, optimizers, sharding=Shardings(shardings))
