"""Fingerprints of the weights that an engine decodes with, from its live layers.

An engine holds other tensors than a checkpoint has: it stacks the query, key and value projections,
and the gate and up projections, and pads the vocabulary. A head that is tied to the embedding is
one parameter with two uses, and both are looked at.

Names that have no counterpart are left out of the fingerprint, and the run names them
(`wire.records.wrong_policy.not_compared`): tensors that the engine renames, computes or holds in
another layout or in wider layers, experts split among several ranks, and quantized layers.

With tensor parallelism each rank sums its part (`asyncrl.engine.remote.worker.shards`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.remote.worker.shards import Shape, Shard, block_sums, shard_of
from asyncrl.wire.weights.fingerprint import TensorSums, collect, sums_of
from asyncrl.wire.weights.layout import Fingerprint


class _Place(NamedTuple):
    """Where the engine holds a tensor."""

    path: str
    """Of the module."""
    part: int = 0
    """Index among the tensors that the module stacks."""
    before: int = 0
    """Rows of those before it, in the checkpoint."""


class HeldWeights:
    """Finds the tensors of an HF state dict in a loaded model, on one device or several.

    An engine overrides `tensor_of` and `sums_by_product` where its layers differ.

    Args:
        model: the engine's.
        shapes: of the HF state dict, tied names included.
        ranks: that the model is split among; all of them must take the fingerprint.
        packed: names of modules that stack others, each with the names that a checkpoint has.
        renamed: a checkpoint's name as the engine has it; None: it has none. None: all the same.
    """

    def __init__(
        self,
        model: Any,
        shapes: Mapping[str, Shape],
        ranks: Ranks | None = None,
        *,
        packed: Mapping[str, list[str]],
        renamed: Callable[[str], str | None] | None = None,
    ) -> None:
        self._model = model
        self._ranks = ranks or Ranks()
        self._shapes = shapes
        self._fused = {
            part: (fused, parts[: parts.index(part)])
            for fused, parts in packed.items()
            for part in parts
        }
        self._renamed: Callable[[str], str | None] = renamed or (lambda name: name)

    def tensor_of(self, module: Any, leaf: str) -> Any:
        """The tensor of a module that a checkpoint calls `leaf`, or something else if none is."""
        return getattr(module, leaf, None)

    def sums_by_product(
        self,
        module: Any,  # noqa: ARG002
        name: str,  # noqa: ARG002
        shard: Shard,  # noqa: ARG002
        shape: Shape,  # noqa: ARG002
    ) -> TensorSums | None:
        """The sums of a tensor that only a product shows; None: its module holds it.

        Args:
            module: that multiplies by it.
            name: of the tensor.
            shard: the block that this rank holds.
            shape: of the whole tensor.
        """
        return None

    def modules(self) -> dict[str, Any]:
        """All modules by path, as a checkpoint's names have it."""
        return dict(self._model.named_modules(remove_duplicate=False))

    def further(self) -> list[tuple[str, TensorSums]]:
        """The sums of what the engine holds besides the tensors of the state dict."""
        return []

    def fingerprint(self, elements: int) -> Iterator[Fingerprint | None]:
        """Of the weights as they are now, in pieces that fit between two steps.

        It must run in the thread that generates: an engine's products may share memory (vLLM
        0.32.0 on a CPU, `csrc/cpu/dnnl_helper.cpp`). All ranks cut at the same places.

        Args:
            elements: of the checkpoint's tensors in a piece, about.

        Yields:
            None after each piece, and the fingerprint at the end.
        """
        modules = self.modules()
        found: list[tuple[str, TensorSums]] = []
        seen = 0
        for name, shape in self._shapes.items():
            with torch.inference_mode():
                sums = self._sums(name, shape, modules)
            if sums is not None:
                found.append((name, sums))
            seen += math.prod(shape)
            if seen >= elements:
                seen = 0
                yield None
        with torch.inference_mode():
            found += self.further()
        with torch.inference_mode():
            whole = collect(self._totals(found))
        yield whole

    def _totals(self, found: list[tuple[str, TensorSums]]) -> list[tuple[str, TensorSums]]:
        """The sums over all ranks, which have the same names in the same order."""
        if self._ranks.size == 1 or not found:
            return found
        none = torch.zeros_like(found[0][1].probe)
        parts = [part for _, one in found for part in (one.whole, one.probe)]
        totals = self._ranks.total(torch.stack([none if one is None else one for one in parts]))
        return [
            (name, TensorSums(one.dtype, None if one.whole is None else whole, probe))
            for (name, one), whole, probe in zip(found, totals[::2], totals[1::2], strict=True)
        ]

    def _sums(self, name: str, shape: Shape, modules: Mapping[str, Any]) -> TensorSums | None:
        """Of one tensor; None if this model has nothing of the kind."""
        place = self._place(name, modules)
        if place is None:
            return None
        leaf, module, ranks = name.rpartition(".")[2], modules[place.path], self._ranks
        shard = shard_of(module, place.part, place.before, shape, ranks.rank, ranks.size)
        if shard is None:
            return None
        product = self.sums_by_product(module, name, shard, shape)
        if product is not None:
            return product
        tensor = self.tensor_of(module, leaf)
        if not isinstance(tensor, Tensor) or tensor.ndim != len(shape):
            return None
        block = tensor[shard.first : shard.first + shard.shape[0]] if shape else tensor
        if tuple(block.shape) != shard.shape:
            return None
        if ranks.size == 1:
            return sums_of(block)
        return block_sums(block, shard, shape) if 0 < len(shape) <= 2 else None

    def _place(self, name: str, modules: Mapping[str, Any]) -> _Place | None:
        renamed = self._renamed(name)
        if renamed is None:
            return None
        path, _, leaf = renamed.rpartition(".")
        if path in modules:
            return _Place(path)
        parent, _, part = path.rpartition(".")
        if part not in self._fused:
            return None
        fused, before = self._fused[part]
        whole = f"{parent}.{fused}" if parent else fused
        above = [name.replace(f".{part}.{leaf}", f".{other}.{leaf}") for other in before]
        if whole not in modules or any(one not in self._shapes for one in above):
            return None
        return _Place(whole, len(before), sum(self._shapes[one][0] for one in above))
