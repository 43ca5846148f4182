"""The optimizer step of one rank, or of a trainer without ranks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.checkpoint.format.tensors import Box
from asyncrl.trainer.optimizer.optimizer import is_decayed, make_adamw, take_step
from asyncrl.trainer.optimizer.training_state import Sharding, Shardings
from asyncrl.trainer.ranks.shards import Shards
from asyncrl.trainer.ranks.world import World
from asyncrl.trainer.sharding.rows import LocalRows


class Rows:
    """A `training_state.Sharding` whose optimizer has this rank's rows of each parameter."""

    def __init__(self, shards: Shards, world: World) -> None:
        self._shares = {id(share.parameter): share for share in shards.shares}
        self._rank = world.rank

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's rows of a parameter; the parameter itself if it is not trained."""
        share = self._shares.get(id(parameter))
        return parameter if share is None else share.own

    def box(self, parameter: nn.Parameter, local: Tensor) -> Box:
        """Place rows, or state that belongs to them, in the whole parameter."""
        share = self._shares[id(parameter)]
        shape = tuple(parameter.shape)
        if not shape:  # one rank has the number as a row, the others have none
            is_here = bool(local.numel())
            return Box(local.view(()) if is_here else local, (), (), is_written=is_here)
        start = min(self._rank * share.height, shape[0])
        return Box(local, (shape[0], *local.shape[1:]), (start, *(0 for _ in local.shape[1:])))


class Update:
    """AdamW over a model's trained parameters, or this rank's rows. Attribute: `optimizer`."""

    def __init__(self, model: nn.Module, config: TrainerConfig, world: World) -> None:
        self._model = model
        self._world = world
        self._shards: Shards | None = None
        self._divided = LocalRows([])
        self.sharding: Sharding = Shardings()
        """Maps the model's parameters to the optimizer's, for checkpoints."""
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        decays = {id(one): is_decayed(name, one) for name, one in named}
        trained = [one for _, one in named]
        if world.size == 1:
            self.optimizer = make_adamw(trained, config, list(decays.values()))
            return
        # In the order in which the optimizer numbers them, which is that of its state.
        trained.sort(key=lambda one: not decays[id(one)])
        divided = [one for one in trained if isinstance(one, DTensor)]
        self._divided = LocalRows(divided)
        self._shards = Shards([one for one in trained if not isinstance(one, DTensor)], world)
        self.sharding = Shardings([self._divided, Rows(self._shards, world)])
        order = [*divided, *(share.parameter for share in self._shards.shares)]
        self.optimizer = make_adamw(self._own, config, [decays[id(one)] for one in order])

    def step(self, rate: float, denominator: float, max_norm: float) -> float:
        """Sum gradients over the ranks, divide, clip, step; return the norm before clipping.

        Collective. Gradients of divided parameters are summed already. Raises NonFiniteError, with
        unchanged weights, if a gradient is not finite.
        """
        if self._shards is None:
            trained = [one for one in self._model.parameters() if one.requires_grad]
            return take_step(self.optimizer, trained, rate, denominator, max_norm)
        self._shards.reduce()
        self._divided.take_gradients()
        norm = take_step(self.optimizer, self._own, rate, denominator, max_norm, self._world.norm)
        for one in self._own:
            one.grad = None
        self._shards.gather()
        return norm

    @property
    def _own(self) -> list[nn.Parameter]:
        assert self._shards is not None  # noqa: S101 - for the type checker
        return [*self._divided.rows, *self._shards.own]

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for one in self._model.parameters():
            one.grad = None
