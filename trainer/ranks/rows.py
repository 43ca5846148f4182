"""Where a rank's rows lie in whole parameters: how checkpoints see them."""

from __future__ import annotations

from torch import Tensor, nn

from asyncrl.trainer.checkpoint.format.tensors import Box
from asyncrl.trainer.ranks.shards import Shards
from asyncrl.trainer.ranks.world import World


class Rows:
    """A `training_state.Sharding`: the optimizer has this rank's rows of each parameter.

    Args:
        shards: what this rank has.
        world: the ranks.
    """

    def __init__(self, shards: Shards, world: World) -> None:
        self._shares = {id(share.parameter): share for share in shards.shares}
        self._rank = world.rank

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's rows of a parameter; the parameter itself if it is not trained."""
        share = self._shares.get(id(parameter))
        return parameter if share is None else share.own

    def box(self, parameter: nn.Parameter, local: Tensor) -> Box:
        """The place of rows that are, or belong to, this rank's rows of a parameter."""
        share = self._shares[id(parameter)]
        shape = tuple(parameter.shape)
        if not shape:  # one rank has the number as a row, the others have none
            is_here = bool(local.numel())
            return Box(local.view(()) if is_here else local, (), (), is_written=is_here)
        start = min(self._rank * share.height, shape[0])
        return Box(local, (shape[0], *local.shape[1:]), (start, *(0 for _ in local.shape[1:])))
