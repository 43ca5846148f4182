"""Publishes a policy's weights: each tensor as a whole, one at a time, and their fingerprint."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.trainer.checkpoint.format.tensors import Box
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.ranks.world import World
from asyncrl.trainer.sharding.rows import local, whole
from asyncrl.wire.weights.fingerprint import (
    MatrixSums,
    TensorSums,
    collect,
    fingerprint,
    name_of,
    probe_columns,
)
from asyncrl.wire.weights.layout import Fingerprint


class Weights:
    """The publishable weights of one policy, or its adapter instead.

    With sharded weights, `whole` and `fingerprint` are collectives, which may raise RankLost.
    """

    def __init__(self, policy: Policy, world: World) -> None:
        self._policy, self._world, self._adapter = policy, world, policy.adapter

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight and persistent buffer by its HF name; a tied weight only once.

        Sharded weights are DTensors, of which `whole` makes plain tensors. Of an adapter, yield A
        and B of each adapted layer.
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
