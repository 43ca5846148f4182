"""A policy whose weights are in parts on the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.trainer.base.errors import TrainerError
from asyncrl.trainer.model.head import TokenScores
from asyncrl.trainer.model.host_memory import memory_left
from asyncrl.trainer.model.packed_batch import PackedBatch
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.ranks.world import World
from asyncrl.trainer.sharding.blocks import ShardedModel
from asyncrl.wire.weights.fingerprint import fingerprint

logger = logging.getLogger(__name__)

T = TypeVar("T")


def one_by_one(load: Callable[[], int], world: World, left: Callable[[], int | None]) -> None:
    """Let each rank load what is large while it is loaded. A collective.

    Args:
        load: gives the bytes of the host's memory that it took meanwhile.
        world: the ranks.
        left: bytes that the host has; None: not known, and taken to be enough.

    Raises:
        RankLost: another rank did not take part.
    """
    size = load() if world.leads else 0
    said = world.gather(msgspec.msgpack.encode(size), "rank 0's loading of the model")
    needed = (world.size - 1) * msgspec.msgpack.decode(said[0], type=int)
    room = left()
    if not world.any(room is not None and room < needed, "whether all can load the model at once"):
        if not world.leads:
            load()
        return
    for rank in range(1, world.size):
        if world.rank == rank:
            load()
        world.barrier(f"rank {rank}'s loading of the model")


class ShardedPolicy(Policy):
    """As `Policy`. Every pass through it is a collective of all ranks.

    It is loaded and checked on the CPU, as a whole, and then divided, a block at a time. Rank 0
    does so first, then the others, one by one unless the host has the memory for all of them.

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
        logger.info("weights in parts on %d ranks; fused layers are not used", world.size)
        mesh = init_device_mesh(device.type, (world.size,))

        def load() -> int:
            cpu = torch.device("cpu")
            super(ShardedPolicy, self).__init__(
                model_path, device=cpu, **{**settings, "fused": False}
            )
            held = self.model.state_dict(keep_vars=True)
            self._loaded = fingerprint(held.items()).whole
            size = sum(int(one.nbytes) for one in held.values())
            low = self._compute_dtype if self._compute_dtype.itemsize == 2 else None
            self._sharded = ShardedModel(self.model, mesh, device, low)
            return size

        one_by_one(load, world, memory_left)
        self.device = device
        world.agree(self._loaded, f"the weights of {model_path}")

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
