"""The tensor-parallel ranks of one engine: the work of rank 0, and that of all.

Each rank has the whole batch and all logits. Stock engines let each rank draw, but a CUDA reduction
in floating point need not give the same bits twice, and a token that differs between two ranks
silently ruins the KV of its request. So

    rank 0   draws, scores, drafts; it owns the rollout cache and everything that is reported
    others   take the tokens from rank 0, and take part in the output layer when rank 0 scores

The collective calls and their order depend only on what all ranks know (the scheduler's output) or
on what rank 0 has broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This worker's place among the ranks."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """The engine's `GroupCoordinator` (SGLang's derives from vLLM's); None for a single rank."""

    @classmethod
    def of_group(cls, group: Any) -> Ranks:
        """Make the ranks of this process from the engine's `GroupCoordinator`."""
        return cls(group.rank_in_group, group.world_size, group) if group.world_size > 1 else cls()

    @property
    def leads(self) -> bool:
        """True if this is rank 0."""
        return self.rank == 0

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor in all ranks; the others pass a tensor of its shape to fill."""
        if self.group is None:
            return tokens
        shared: torch.Tensor = self.group.broadcast(tokens.contiguous(), src=0)
        return shared

    def share(self, value: T) -> T:
        """Return rank 0's value in all ranks; the others' values are ignored."""
        if self.group is None:
            return value
        shared: T = self.group.broadcast_object(value if self.leads else None, src=0)
        return shared

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in all ranks."""
        if self.group is None:
            return [value]
        values: list[T] = [value] * self.size
        torch.distributed.all_gather_object(values, value, group=self.group.cpu_group)
        return values

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of an integer tensor, modulo 2**64; overwrites it."""
        if self.group is not None:
            torch.distributed.all_reduce(numbers, group=self.group.device_group)
        return numbers
