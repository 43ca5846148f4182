"""Fingerprints of the weights that an engine decodes with, from its live layers.

Names without a counterpart are left out of the fingerprint, and the run names them
(`wire.records.wrong_policy.not_compared`): tensors that the engine renames, computes or holds in
another layout or in wider layers, experts split among several ranks, and quantized layers.

With tensor parallelism, the attributes of layers say how they are split (vLLM's; SGLang inherits
them). The sums of a fingerprint add over blocks (`asyncrl.wire.weights.fingerprint`), so each rank
sums the block that it holds. The sums of replicas (norms; key and value heads if there are fewer
than ranks) are added with factors that sum to 1 modulo 2**64, all but the first pseudo-random: if
one replica differs, the total is wrong with a probability of about 1 - 2**-64.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.wire.weights.fingerprint import (
    MatrixSums,
    TensorSums,
    collect,
    name_of,
    probe_columns,
    sums_of,
)
from asyncrl.wire.weights.layout import Fingerprint

Shape = tuple[int, ...]
_GAMMA, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Shard(NamedTuple):
    """A block of a tensor, along its first two dimensions; the others are whole."""

    first: int
    """Its first row in the rank's tensor, which may hold several tensors of the checkpoint."""
    shape: Shape
    row: int
    """Its first row in the whole tensor."""
    column: int
    factor: int = 1
    """Factor of its sums before they are added over the ranks, as int64."""


def shard_of(
    module: Any, part: int, before: int, shape: Shape, rank: int, size: int
) -> Shard | None:
    """Return the block of a tensor that a layer holds in a rank.

    None in all ranks if the layer is wider than the tensor and several ranks share it: SGLang makes
    such layers on a CPU for sizes that are not a multiple of 32. With one rank, the tensors that
    such a layer stacks lie further apart.

    `part` is the index among the tensors that the layer stacks; `before` are the rows of those
    before it, in the checkpoint; `shape` is that of the whole tensor.
    """
    sizes: list[int] = getattr(module, "output_partition_sizes", None) or []
    if size == 1 or not shape:
        return Shard(sum(sizes[:part]) if part < len(sizes) else before, shape, 0, 0)
    vocabulary = getattr(module, "shard_indices", None)
    if vocabulary is not None:
        start, end = vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index
        return Shard(0, (end - start, *shape[1:]), start, 0)
    sizes = sizes or [shape[0]]
    width = getattr(module, "input_size_per_partition", None)
    if len(shape) == 2 and width is not None and width < shape[1]:
        if width * size != shape[1]:
            return None
        return Shard(sum(sizes[:part]), (sizes[part], width), 0, rank * width)
    replicas, padding = divmod(size * sizes[part], shape[0])
    if padding or not replicas:
        return None
    row = rank // replicas * sizes[part]
    factor = _factor(rank % replicas, replicas)
    return Shard(sum(sizes[:part]), (sizes[part], *shape[1:]), row, 0, factor)


def block_sums(block: Tensor, shard: Shard, shape: Shape) -> TensorSums:
    """Return the sums of a block, as part of a tensor of this shape with at most two dimensions."""
    if len(shape) == 1:
        rows, columns, row, column = 1, shape[0], 0, shard.row
    else:
        (rows, columns), row, column = shape, shard.row, shard.column
    matrix = block.reshape(-1, block.shape[-1])
    whole = MatrixSums(rows, columns, block.device)
    whole.add(matrix, row, column)
    chosen, first = probes_within(columns, column, matrix.shape[1])
    picked = matrix.index_select(1, torch.tensor(chosen, dtype=torch.int64, device=block.device))
    probe = MatrixSums(rows, len(probe_columns(columns)), block.device)
    probe.add(picked, row, first)
    return TensorSums(name_of(block.dtype), whole.value * shard.factor, probe.value * shard.factor)


def probes_within(columns: int, column: int, width: int) -> tuple[list[int], int]:
    """Return the probe's columns within a block, relative to it, and the index of the first."""
    probes = probe_columns(columns)
    inside = [at for at, one in enumerate(probes) if column <= one < column + width]
    return [probes[at] - column for at in inside], inside[0] if inside else 0


def _factor(replica: int, replicas: int) -> int:
    others = [(_GAMMA * (2 * one + 1)) & _MASK for one in range(1, replicas)]
    value = (1 - sum(others)) & _MASK if replica == 0 else others[replica - 1]
    return value - (1 << 64) if value >> 63 else value


class _Place(NamedTuple):
    path: str
    part: int = 0
    """Index among the tensors that the module stacks."""
    before: int = 0
    """Rows of those before it, in the checkpoint."""


class HeldWeights:
    """Finds the tensors of an HF state dict in a loaded model, on one device or several.

    An engine overrides `tensor_of` and `sums_by_product` where its layers differ. `shapes` include
    tied names. All `ranks` must take the fingerprint. `packed` maps modules that stack others to
    the checkpoint's names; `renamed` maps a checkpoint's name to the engine's, None if it has none.
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
        """Return the tensor of a module that a checkpoint calls `leaf`; other values mean none."""
        return getattr(module, leaf, None)

    def sums_by_product(
        self, _module: Any, _name: str, _shard: Shard, _shape: Shape
    ) -> TensorSums | None:
        """Return the sums of a tensor that only a product shows; None: its module holds it."""
        return None

    def modules(self) -> dict[str, Any]:
        """Return all modules by the checkpoint's paths."""
        return dict(self._model.named_modules(remove_duplicate=False))

    def further(self) -> list[tuple[str, TensorSums]]:
        """Return the sums of what the engine holds besides the tensors of the state dict."""
        return []

    def fingerprint(self, elements: int) -> Iterator[Fingerprint | None]:
        """Take the fingerprint of the current weights, in pieces that fit between two steps.

        It must run in the thread that generates: an engine's products may share memory (vLLM 0.32.0
        on a CPU, `csrc/cpu/dnnl_helper.cpp`). All ranks cut at the same places, after about
        `elements` elements. Yields None after each piece, and the fingerprint at the end.
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
            whole = collect(self._totals(found + self.further()))
        yield whole

    def _totals(self, found: list[tuple[str, TensorSums]]) -> list[tuple[str, TensorSums]]:
        """Sum over all ranks, which have the same names in the same order."""
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
        """Return the sums of one tensor; None if this model does not hold it."""
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
