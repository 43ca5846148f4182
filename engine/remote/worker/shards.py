"""Which part of a tensor of the checkpoint a tensor-parallel rank holds.

Layers say how they are split as in vLLM, from which SGLang's descend.

The sums of a fingerprint add over blocks (`asyncrl.wire.weights.fingerprint`). So each rank sums
the block that it holds, and the sum over all ranks is that of the whole tensor. Nothing is
gathered.

Several ranks may hold the same block: norms, and key and value heads where there are fewer of them
than ranks. The sums of such replicas are added with factors that sum to 1 modulo 2**64, all but the
first of them pseudo-random. If all replicas are equal, the total is that of one; if one differs,
the total is wrong with a probability of about 1 - 2**-64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncrl.wire.weights.fingerprint import MatrixSums, TensorSums, name_of, probe_columns

Shape = tuple[int, ...]
_GAMMA, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class Shard(NamedTuple):
    """A block of a tensor, along its first two dimensions; the others are whole."""

    first: int
    """Its first row in the rank's own tensor, which may hold several tensors of the checkpoint."""
    shape: Shape
    row: int
    """Its first row in the whole tensor."""
    column: int
    """Its first column there."""
    factor: int = 1
    """What its sums are multiplied by before they are added up over the ranks, as int64."""


def shard_of(
    module: Any, part: int, before: int, shape: Shape, rank: int, size: int
) -> Shard | None:
    """The block of a tensor that a layer holds in a rank.

    None in all ranks if the layer is wider than the tensor and several ranks share it, as SGLang
    makes layers on a CPU whose sizes are no multiple of 32. One rank has the tensors that such a
    layer stacks further apart.

    Args:
        module: the layer. Linear layers and embeddings say how they are split; another one
            holds its tensors whole.
        part: index among the tensors that the layer stacks; 0 if it holds one.
        before: rows of those before it, in the checkpoint.
        shape: of the whole tensor.
        rank: of this process.
        size: number of ranks.
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
    """The sums of a block, as part of a tensor of this shape with at most two dimensions."""
    rows, columns, row, column = _as_matrix(shard, shape)
    matrix = block.reshape(-1, block.shape[-1])
    whole = MatrixSums(rows, columns, block.device)
    whole.add(matrix, row, column)
    chosen, first = probes_within(columns, column, matrix.shape[1])
    picked = matrix.index_select(1, torch.tensor(chosen, dtype=torch.int64, device=block.device))
    probe = MatrixSums(rows, len(probe_columns(columns)), block.device)
    probe.add(picked, row, first)
    return TensorSums(name_of(block.dtype), whole.value * shard.factor, probe.value * shard.factor)


def probes_within(columns: int, column: int, width: int) -> tuple[list[int], int]:
    """Columns of the probe within a block, counted from its own first; and the first one's index.

    Args:
        columns: of the whole tensor.
        column: first one of the block.
        width: of the block.
    """
    probes = probe_columns(columns)
    inside = [at for at, one in enumerate(probes) if column <= one < column + width]
    return [probes[at] - column for at in inside], inside[0] if inside else 0


def _as_matrix(shard: Shard, shape: Shape) -> tuple[int, int, int, int]:
    """Rows and columns of the whole tensor in a fingerprint, and the block's first ones."""
    if len(shape) == 1:
        return 1, shape[0], 0, shard.row
    return shape[0], shape[1], shard.row, shard.column


def _factor(replica: int, replicas: int) -> int:
    others = [(_GAMMA * (2 * one + 1)) & _MASK for one in range(1, replicas)]
    value = (1 - sum(others)) & _MASK if replica == 0 else others[replica - 1]
    return value - (1 << 64) if value >> 63 else value
