"""The optimizer step of one rank, and of a trainer that has only one."""

from __future__ import annotations

from torch import nn

from trainer.config import TrainerConfig
from trainer.optimizer import make_adamw, take_step
from trainer.ranks.rows import Rows
from trainer.ranks.shards import Shards
from trainer.ranks.world import World
from trainer.training_state import Sharding, Unsharded


class Update:
    """AdamW over a model's trained parameters, or over this rank's rows of them.

    Attribute: `optimizer`.

    Args:
        model: whose parameters are trained.
        config: the trainer's settings.
        world: the ranks.
    """

    def __init__(self, model: nn.Module, config: TrainerConfig, world: World) -> None:
        self._model = model
        self._world = world
        self._shards: Shards | None = None
        self.sharding: Sharding = Unsharded()
        """What the optimizer has of the model's parameters, for checkpoints."""
        trained = [one for one in model.parameters() if one.requires_grad]
        if world.size == 1:
            self.optimizer = make_adamw(trained, config)
            return
        # In the order in which the optimizer numbers them, which is that of its state.
        trained.sort(key=lambda one: one.ndim < 2)
        self._shards = Shards(trained, world)
        self.sharding = Rows(self._shards, world)
        own = self._shards.own
        matrices = [share.parameter.ndim >= 2 for share in self._shards.shares]
        self.optimizer = make_adamw(own, config, matrices)

    def step(self, rate: float, denominator: float, max_norm: float) -> float:
        """Sum gradients over the ranks, divide, clip, step; gives the norm before clipping.

        A collective of all ranks.

        Raises:
            NonFiniteError: a gradient is not finite; the weights are unchanged.
            RankLost: another rank did not take part.
        """
        if self._shards is None:
            trained = [one for one in self._model.parameters() if one.requires_grad]
            return take_step(self.optimizer, trained, rate, denominator, max_norm)
        self._shards.reduce()
        norm = take_step(
            self.optimizer, self._shards.own, rate, denominator, max_norm, self._world.norm
        )
        for one in self._shards.own:
            one.grad = None
        self._shards.gather()
        return norm

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for one in self._model.parameters():
            one.grad = None
