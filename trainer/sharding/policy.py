"""A policy whose weights are sharded over the ranks, block by block, by FSDP2.

    block            rows of its matrices on each rank; whole for its forward and backward pass
    embedding, head  the same, each separately, or together with the model if they are one tensor
    norms, biases    whole on each rank: they are few, and computed in float32

A weight is gathered in the type in which it is computed: bfloat16 in the blocks of `dtype:
bfloat16`. Gradients are summed over the ranks, in the parameters' type, after each micro-batch.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.trainer.base.errors import TrainerError, UnsupportedModelError
from asyncrl.trainer.model.head import TokenScores
from asyncrl.trainer.model.memory_estimate import memory_left
from asyncrl.trainer.model.packing import PackedBatch
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.ranks.world import World
from asyncrl.wire.weights.fingerprint import fingerprint

logger = logging.getLogger(__name__)

_METHOD = "asyncrl_run"
"""Name of a method that FSDP takes for a forward pass."""
T = TypeVar("T")


class ShardedModel:
    """Runs functions that use a model's weights, gathered while they run.

    Parameters become DTensors. Blocks compute in `low`, by default the parameters' type. Raises
    UnsupportedModelError if transformers names no blocks in the model.
    """

    def __init__(
        self, model: PreTrainedModel, mesh: DeviceMesh, where: torch.device, low: torch.dtype | None
    ) -> None:
        blocks = blocks_of(model)
        if not blocks:
            raise UnsupportedModelError(
                "trainer.sharding: full needs blocks that transformers can recompute "
                f"(GradientCheckpointingLayer), but {type(model).__name__} has none; set "
                "trainer.sharding: optimizer"
            )
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": True,
            "ignored_params": {one for one in model.parameters() if one.ndim < 2},
            "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False),
        }
        in_blocks = options
        if low is not None:
            policy = MixedPrecisionPolicy(low, torch.float32, cast_forward_inputs=False)
            in_blocks = {**options, "mp_policy": policy}
        for block in blocks:
            fully_shard(block, **in_blocks)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        self._model: Any = model
        self._head: Any = model
        if head.weight is not embedding.weight:
            fully_shard(embedding, **options).set_unshard_in_backward(False)
            self._head = fully_shard(head, **options)
        fully_shard(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        model.set_reduce_scatter_unused_params(True)
        for module in (self._model, self._head):
            if not hasattr(module, _METHOD):
                setattr(module, _METHOD, _run)
                register_fsdp_forward_method(module, _METHOD)
        _move_rest(model, where)

    def with_body(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that computes the model's forward pass, except its head."""
        out: T = getattr(self._model, _METHOD)(function, *arguments)
        if not torch.is_grad_enabled():
            self._model.reset_iter_state()  # otherwise only a backward pass does this
        return out

    def with_head(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that uses the head's weight, within `with_body`."""
        if self._head is self._model:
            return function(*arguments)
        out: T = getattr(self._head, _METHOD)(function, *arguments)
        return out


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The transformer's outermost blocks."""
    found: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, GradientCheckpointingLayer):
            continue
        if not any(module in list(one.modules()) for one in found):
            found.append(module)
    return found


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    """FSDP marks the result, to gather weights again in the backward pass."""
    return _own(function(*arguments))


def _own(value: Any) -> Any:
    """Copy views: a mark on a view can be lost."""
    if isinstance(value, Tensor):
        return value.clone() if value.requires_grad and value._is_view() else value  # noqa: SLF001
    if isinstance(value, tuple):
        return tuple(map(_own, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _own(getattr(value, one.name)) for one in fields(value)})
    return value


@torch.no_grad()
def _move_rest(model: nn.Module, device: torch.device) -> None:
    """Move undivided tensors to the device, as copies.

    A tensor read from a file is a view of its mapping: one norm would keep the model in memory.
    """
    for one in [*model.parameters(), *model.buffers()]:
        if not isinstance(one, DTensor):
            one.data = one.data.to(device, copy=True)


def one_by_one(load: Callable[[], int], world: World, left: Callable[[], int | None]) -> None:
    """Let ranks load one by one if they lack the memory to do so at once. Collective.

    `load` returns its peak host memory in bytes; `left` the host's free memory, if it is known.
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
    """A `Policy` whose every pass is a collective of all ranks.

    It is loaded and checked on the CPU, as a whole, and then divided, a block at a time. Rank 0
    does so first, then the others, one by one unless the host has the memory for all of them.
    `fused` has no effect: fused layers bypass gathering.
    """

    is_sharded = True
    _is_within = False

    def __init__(self, model_path: str, *, device: torch.device, world: World, **more: Any) -> None:
        self._speeds_up = device.type == "cpu"
        logger.info("weights are sharded over %d ranks; fused layers are not used", world.size)
        mesh = init_device_mesh(device.type, (world.size,))

        def load() -> int:
            cpu = torch.device("cpu")
            super(ShardedPolicy, self).__init__(model_path, device=cpu, **{**more, "fused": False})
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
        """Score as `Policy.score` does."""
        if not self.has_plain_head:
            return super().score(batch, with_routes=with_routes)
        return self.within(partial(super().score, with_routes=with_routes), batch)

    def hidden(self, batch: PackedBatch) -> Tensor:
        """Compute as `Policy.hidden` does."""
        return self.within(super().hidden, batch)

    def score_hidden(self, hidden: Tensor, targets: Tensor) -> TokenScores:
        """Score as `Policy.score_hidden` does, inside `within`."""
        return self._sharded.with_head(super().score_hidden, hidden, targets)

    def within(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function while the weights outside of blocks and head are gathered."""
        if self._is_within:
            return function(*arguments)
        self._is_within = True
        try:
            return self._sharded.with_body(function, *arguments)
        finally:
            self._is_within = False

    def changed(self, temperature: float | None, weights: Sequence[tuple[str, Tensor]]) -> NoReturn:
        """Not supported: it is for one rank alone. Raises TrainerError."""
        del temperature, weights
        raise TrainerError("with trainer.sharding: full no rank can compute alone")
