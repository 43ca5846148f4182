"""Attention of packed rows on a CPU by matrix products of tiles, without padding.

torch's fused kernel for CPUs computes padded sequences, at a fraction of the speed of matrix
products. Here each segment of the row (`Layout.segments`) is computed separately: a tile of its
queries, of all heads that share keys, against the keys up to the tile's end, whose last square has
a mask. The backward pass recomputes a tile's probabilities, so memory grows with the tokens, not
with their square. A segment's sums depend on its own tokens only, not on the rest of the row.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

WORTHWHILE = 64
"""Average tokens that segments must have: shorter ones cost more in calls than in products."""
_QUERIES = 64

Segments = Sequence[tuple[int, int, int, int]]


class _Tile(NamedTuple):
    first: int
    last: int
    seen: int
    """Number of the segment's first keys that the last query sees."""

    @property
    def rows(self) -> slice:
        """Queries of the tile, as a slice."""
        return slice(self.first, self.last)


def serves(query: Tensor, segments: Segments) -> bool:
    """Return True if `attend` is faster for `[1, H, T, D]` queries."""
    if query.device.type != "cpu" or query.dtype not in (torch.float32, torch.float64):
        return False
    return query.shape[2] >= WORTHWHILE * len(segments) and not torch.is_autocast_enabled("cpu")


def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float | None) -> Tensor:
    """Causal attention within segments: `[1, H, T, D]` and `[1, H_kv, T, D]` to `[1, T, H, D]`.

    `segments` are `Layout.segments`; the scale of the scores defaults to 1 over the root of D.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _Attend.apply(q[0], k[0], v[0], segments, factor)
    return out[None]


class _Attend(torch.autograd.Function):
    """`[H, T, D]`, `[J, T, D]` twice to `[T, H, D]`; J heads of keys, G = H / J that share one."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
    ) -> Tensor:
        ctx.segments, ctx.scale = segments, scale
        ctx.save_for_backward(query, key, value)
        groups = query.unflatten(0, (len(key), -1))
        out = query.new_empty(query.shape[1], *groups.shape[:2], query.shape[2])
        for segment in segments:
            keys, values = (_of_segment(one, segment) for one in (key, value))
            for tile in _tiles(segment):
                chances = _chances(groups[:, :, tile.rows].flatten(1, 2), keys, tile, scale)
                found = chances @ values[:, : tile.seen]
                out[tile.rows] = found.unflatten(1, (groups.shape[1], -1)).permute(2, 0, 1, 3)
        return out.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value = ctx.saved_tensors
        groups = query.unflatten(0, (len(key), -1))
        given = grads[0].unflatten(1, groups.shape[:2]).permute(1, 2, 0, 3)
        of_query = torch.empty_like(groups, memory_format=torch.contiguous_format)
        of_key, of_value = (
            torch.zeros_like(one, memory_format=torch.contiguous_format) for one in (key, value)
        )
        for segment in ctx.segments:
            keys, values = (_of_segment(one, segment) for one in (key, value))
            key_sums, value_sums = torch.zeros_like(keys), torch.zeros_like(values)
            for tile in _tiles(segment):
                queries, mine = (one[:, :, tile.rows].flatten(1, 2) for one in (groups, given))
                seen = slice(0, tile.seen)
                chances = _chances(queries, keys, tile, ctx.scale)
                value_sums[:, seen].baddbmm_(chances.transpose(1, 2), mine)
                changes = torch.ops.aten._softmax_backward_data(  # noqa: SLF001 - autograd's own
                    mine @ values[:, seen].transpose(1, 2), chances, -1, chances.dtype
                )
                found = _scaled_product(changes, keys[:, seen], ctx.scale)
                of_query[:, :, tile.rows] = found.unflatten(1, (groups.shape[1], -1))
                key_sums[:, seen].baddbmm_(changes.transpose(1, 2), queries, alpha=ctx.scale)
            start, end, place, shared = segment
            for whole, part in ((of_key, key_sums), (of_value, value_sums)):
                whole[:, start:end] += part[:, shared:]
                whole[:, place : place + shared] += part[:, :shared]
        return of_query.flatten(0, 1), of_key, of_value, None, None


def _of_segment(packed: Tensor, segment: tuple[int, int, int, int]) -> Tensor:
    """`[J, N, D]` that a segment attends to: the tokens that it shares, then its own."""
    start, end, place, shared = segment
    if place + shared == start or not shared:
        return packed[:, start - shared : end]
    return torch.cat([packed[:, place : place + shared], packed[:, start:end]], 1)


def _tiles(segment: tuple[int, int, int, int]) -> Iterator[_Tile]:
    start, end, _, shared = segment
    count = -(-(end - start) // _QUERIES)
    ends = [start + (end - start) * (i + 1) // count for i in range(count)]
    for first, last in zip([start, *ends], ends, strict=False):
        yield _Tile(first, last, shared + last - start)


def _chances(queries: Tensor, keys: Tensor, tile: _Tile, scale: float) -> Tensor:
    """`[J, G n, seen]` attention of n queries of all heads to the keys, 0 for later ones."""
    scores = _scaled_product(queries, keys[:, : tile.seen].transpose(1, 2), scale)
    count = tile.last - tile.first
    square = scores.unflatten(1, (-1, count))[..., tile.seen - count :]
    square.masked_fill_(_later(count), -torch.inf)
    return scores.softmax(-1)


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    empty = left.new_empty(len(left), left.shape[1], right.shape[2])
    return torch.baddbmm(empty, left, right, beta=0, alpha=scale)


@functools.cache
def _later(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).triu(1)
