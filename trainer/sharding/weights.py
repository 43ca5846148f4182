"""Publishes a policy's weights: each tensor as a whole, one at a time, and their fingerprint.

`LocalRows` are this rank's rows of the parameters that FSDP2 divided, which are DTensors.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.trainer.checkpoint.format.tensors import Box
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.ranks.world import World
from asyncrl.wire.weights.fingerprint import (
    MatrixSums,
    TensorSums,
    collect,
    fingerprint,
    name_of,
    probe_columns,
)
from asyncrl.wire.weights.layout import Fingerprint


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


class Weights:
    """The publishable weights of one policy, or its adapter instead.

    With sharded weights, `whole` and `fingerprint` are collectives, which may raise RankLost.
    """

    def __init__(self, policy: Policy, world: World) -> None:
        self._policy, self._world, self._adapter = policy, world, policy.adapter

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight and persistent buffer by its HF name; a tied weight only once.

        Sharded weights are DTensors, which `whole` gathers. Of an adapter, yield A and B.
        """
        if self._adapter is not None:
            yield from self._adapter.tensors()
            return
        seen: set[int] = set()
        for name, tensor in self._named():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor.detach()

    def whole(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather one of these tensors."""
        return whole(tensor, dtype, self._world)

    def fingerprint(self, dtype: torch.dtype | None = None) -> Fingerprint:
        """Fingerprint as an engine of this data type holds them; tied ones by each name.

        An adapter is merged. Without a data type: unconverted, unmerged, a tied one once.
        """
        if self._adapter is not None:
            return self._adapter.own() if dtype is None else self._adapter.fingerprint(dtype)
        given = list(self.tensors()) if dtype is None else self._named()
        if not self._policy.is_sharded:
            return fingerprint(given, dtype)
        known = {id(tensor): tensor for _, tensor in given}
        own = np.stack([self._sums(one, dtype).cpu().numpy() for one in known.values()])
        found = self._world.gather(own.astype("<i8").tobytes(), "the digests of the weights")
        # Sums of the ranks' rows, modulo 2**64.
        total = np.stack([np.frombuffer(one, "<i8") for one in found]).sum(0).reshape(own.shape)
        sums = dict(zip(known, torch.from_numpy(total), strict=True))
        return collect([(name, _named(one, sums[id(one)], dtype)) for name, one in given])

    def take_part(self, dtype: torch.dtype) -> None:
        """Join rank 0's publishing on the other ranks: `fingerprint`, then `whole` of each."""
        if self._policy.is_sharded:
            self.fingerprint(dtype)
            for _, tensor in self.tensors():
                self.whole(tensor, held_as(tensor, dtype))

    def _named(self) -> list[tuple[str, Tensor]]:
        return list(self._policy.model.state_dict(keep_vars=True).items())

    @torch.no_grad()
    def _sums(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        """`[4]` int64: the two sums of this rank's part, and the two of its probe."""
        mine, box = local(tensor), Box.of(tensor)
        if not isinstance(tensor, DTensor) and not self._world.leads:
            return torch.zeros(4, dtype=torch.int64)
        columns = box.shape[-1] if box.shape else 1
        rows = math.prod(box.shape[:-1])
        first = box.offsets[0] * math.prod(box.shape[1:-1]) if box.shape[1:] else 0
        matrix = mine.reshape(-1, columns)
        both = [MatrixSums(rows, columns, mine.device, dtype)]
        both[0].add(matrix, first)
        chosen = torch.tensor(probe_columns(columns), device=mine.device)
        both.append(MatrixSums(rows, len(chosen), mine.device, dtype))
        both[1].add(matrix.index_select(1, chosen), first)
        return torch.cat([one.value for one in both])


def held_as(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Type in which a tensor is published to engines of `dtype`."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def _named(tensor: Tensor, sums: Tensor, dtype: torch.dtype | None) -> TensorSums:
    held = tensor.dtype if dtype is None else held_as(tensor, dtype)
    return TensorSums(name_of(held), sums[:2], sums[2:])
