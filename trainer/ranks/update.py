"""The optimizer step of one rank, and of a trainer that has only one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from trainer.config import TrainerConfig
from trainer.optimizer import make_adamw, take_step
from trainer.ranks.shards import Shards
from trainer.ranks.world import World


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
        trained = [one for one in model.parameters() if one.requires_grad]
        if world.size == 1:
            self.optimizer = make_adamw(trained, config)
            return
        # In the order in which the optimizer numbers them, which is that of its state.
        trained.sort(key=lambda one: one.ndim < 2)
        self._shards = Shards(trained, world)
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

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state as that of a single process, on rank 0. A collective.

        Raises:
            RankLost: another rank did not take part.
        """
        state: dict[str, Any] = self.optimizer.state_dict()
        if self._shards is None:
            return state
        whole = {index: dict(entries) for index, entries in state["state"].items()}
        shares = self._shards.shares
        names = [name for name, value in whole.get(0, {}).items() if _is_moment(value)]
        for name in names:
            own = [whole[index][name] for index in range(len(shares))]
            for index, moment in enumerate(self._shards.whole(own)):
                whole[index][name] = moment
        return {**state, "state": whole}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave on rank 0, of as many ranks as there were.

        Raises:
            KeyError, ValueError, RuntimeError: it is of another model.
        """
        shards = self._shards
        if shards is not None:
            own = {
                index: {
                    name: shards.rows_of(index, value) if _is_moment(value) else value
                    for name, value in entries.items()
                }
                for index, entries in state["state"].items()
            }
            state = {**state, "state": own}
        self.optimizer.load_state_dict(state)


def _is_moment(value: Any) -> bool:
    """Whether it has the parameter's shape; a number of steps has none."""
    return isinstance(value, Tensor) and value.ndim > 0
