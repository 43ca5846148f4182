"""This rank's rows of the parameters that FSDP2 divided: DTensors on one axis of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.trainer.checkpoint.format.tensors import Box
from asyncrl.trainer.ranks.world import World


class LocalRows:
    """The optimizer's view of divided parameters, a `trainer.optimizer.training_state.Sharding`.

    Attribute: `rows`, this rank's of each DTensor, sharing its memory.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self.rows = [nn.Parameter(local(one), requires_grad=False) for one in parameters]
        pairs = zip(parameters, self.rows, strict=True)
        self._own = {id(parameter): own for parameter, own in pairs}

    def take_gradients(self) -> None:
        """Move the gradients, already summed over the ranks, to this rank's rows."""
        for parameter, own in zip(self._parameters, self.rows, strict=True):
            own.grad = None if parameter.grad is None else local(parameter.grad)
            parameter.grad = None

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's rows of a parameter; the parameter itself if it is not one of these."""
        return self._own.get(id(parameter), parameter)

    def box(self, parameter: nn.Parameter, local: Tensor) -> Box:
        """Place rows, or state that belongs to them, in the whole parameter."""
        found = Box.of(parameter)
        shape = (found.shape[0], *local.shape[1:])
        offsets = (found.offsets[0], *(0 for _ in local.shape[1:]))
        return Box(local, shape, offsets, found.is_written)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, without gradient; any other tensor unchanged."""
    found = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


@torch.no_grad()
def whole(tensor: Tensor, dtype: torch.dtype, world: World) -> Tensor:
    """All rows of a tensor, in this type. Collective for a DTensor. Raises RankLost."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to(dtype)
    mine = local(tensor).to(dtype)
    count = tensor.shape[0]
    height = -(-count // world.size)
    given = mine.new_zeros(height, *tensor.shape[1:])
    given[: len(mine)] = mine
    found = mine.new_empty(world.size * height, *tensor.shape[1:])
    # As bytes, since not every backend supports every type.
    parts = found.view(-1).view(torch.uint8).view(world.size, -1)
    world.all_gather(parts, given.view(-1).view(torch.uint8), "weights")
    return found[:count]
