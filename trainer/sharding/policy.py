"""A policy whose weights are in parts on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from trainer.errors import TrainerError
from trainer.head import TokenScores
from trainer.policy import PackedBatch, Policy
from trainer.ranks.world import World
from trainer.sharding.blocks import ShardedModel
from wire.weights.fingerprint import fingerprint

T = TypeVar("T")


class ShardedPolicy(Policy):
    """As `Policy`. Every pass through it is a collective of all ranks.

    It is loaded and checked on the CPU, as a whole, and then divided, a block at a time.

    Args:
        model_path: as in `Policy`.
        device: of this rank.
        world: the ranks.
        settings: further ones of `Policy`; `fused` has no effect, as fused layers read weights
            without asking for them.
    """

    is_sharded = True

    def __init__(
        self, model_path: str, *, device: torch.device, world: World, **settings: Any
    ) -> None:
        self._speeds_up = device.type == "cpu"
        cpu = torch.device("cpu")
        super().__init__(model_path, device=cpu, **{**settings, "fused": False})
        held = self.model.state_dict(keep_vars=True).items()
        world.agree(fingerprint(held).whole, f"the weights of {model_path}")
        low = self._compute_dtype if self._compute_dtype.itemsize == 2 else None
        self._sharded = ShardedModel(self.model, world.size, device, low)
        self.device = device

    def score(self, batch: PackedBatch, *, with_routes: bool = False) -> TokenScores:
        """As `Policy.score`."""
        if not self.has_plain_head:
            return super().score(batch, with_routes=with_routes)
        return self.within(self._score, batch, with_routes)

    def hidden(self, batch: PackedBatch) -> Tensor:
        """As `Policy.hidden`."""
        return self.within(super().hidden, batch)

    def score_hidden(self, hidden: Tensor, targets: Tensor) -> TokenScores:
        """As `Policy.score_hidden`, inside `within`."""
        return self._sharded.with_head(super().score_hidden, hidden, targets)

    def within(self, function: Callable[..., T], *arguments: Any) -> T:
        """As `Policy.within`: the weights outside of blocks and head are whole meanwhile."""
        if self._is_within:
            return function(*arguments)
        self._is_within = True
        try:
            return self._sharded.with_body(function, *arguments)
        finally:
            self._is_within = False

    def changed(
        self,
        temperature: float | None,
        weights: Sequence[tuple[str, Tensor]],
    ) -> NoReturn:
        """Not built: it is for one rank alone. Raises TrainerError."""
        del temperature, weights
        raise TrainerError("with trainer.sharding: full no rank computes alone")

    _is_within = False

    def _score(self, batch: PackedBatch, with_routes: bool) -> TokenScores:
        return super().score(batch, with_routes=with_routes)
