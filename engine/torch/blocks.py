"""The attention of one forward pass in blocks of adjacent rows, each a padded batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.torch.attention import Hidden
from asyncrl.rollout.trajectory import IntArray

LongArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Decoding:
    """The m decoding rows of a block."""

    lengths: IntArray
    """`[m]` valid keys of each."""
    counts: IntArray
    """`[m]` new tokens of each."""
    depths: IntArray | None
    """`[sum(counts)]` positions of the new tokens after the row's first one; None: chains."""

    def positions(self, queries: int, keys: int) -> tuple[LongArray, LongArray]:
        """Return positions of the queries `[m, Q]` and the keys `[m, L]` in their contexts."""
        rows = len(self.lengths)
        of_keys: LongArray = np.tile(np.arange(keys, dtype=np.int64), (rows, 1))
        # Padding is given the last position: it sees a key, and its result is not read.
        ends = self.lengths[:, None].astype(np.int64)
        of_queries: LongArray = np.minimum(ends + np.arange(queries), keys - 1)
        if self.depths is not None:
            row = np.repeat(np.arange(rows), self.counts)
            first = np.cumsum(self.counts) - self.counts
            column = np.arange(len(row)) - np.repeat(first, self.counts)
            at = self.lengths[row] + self.depths
            of_queries[row, column] = of_keys[row, self.lengths[row] + column] = at
        return of_queries, of_keys


@dataclass(slots=True)
class Block:
    """Adjacent rows whose attention runs as one padded batch."""

    first_row: int
    rows: int
    queries: int
    """Q: the most tokens of a row in this block."""
    first_token: int
    tokens: int
    scatter: torch.Tensor | None
    """`[tokens]` index of each packed token in `[rows * Q]`; None if no row is shorter."""
    mask: torch.Tensor | None
    """`[rows, 1, Q, L]` additive; None: causal over the block's own tokens (a fresh context)."""
    decoding: Decoding | None = None
    """Set for a block with a mask."""
    _grouped: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def grouped_mask(self, groups: int, window: int | None = None) -> torch.Tensor:
        """Return the mask `[rows, 1, G * Q, L]` for G query heads per key head folded into Q."""
        if self.mask is None:
            raise ValueError("a causal block has no mask")
        if (groups, window) not in self._grouped:
            mask = self.mask if window is None else self._within(window)
            m, _, q, length = mask.shape
            wide = mask.unsqueeze(2).expand(m, 1, groups, q, length)
            self._grouped[groups, window] = wide.reshape(m, 1, groups * q, length)
        return self._grouped[groups, window]

    def _within(self, window: int) -> torch.Tensor:
        """Return the mask without keys that are `window` positions or more before their query."""
        if self.mask is None or self.decoding is None:
            raise ValueError("the positions of the block's keys are not known")
        queries, keys = self.decoding.positions(*self.mask.shape[2:])
        if not (queries.max(initial=0) >= window):
            return self.mask
        far = torch.from_numpy(keys[:, None, :] <= queries[:, :, None] - window)
        return self.mask.masked_fill(far[:, None].to(self.mask.device), float("-inf"))

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """`[tokens, heads, D]` to `[rows, Q, heads, D]`."""
        if self.scatter is not None:
            padded = packed.new_zeros(self.rows * self.queries, *packed.shape[1:])
            packed = padded.index_copy_(0, self.scatter, packed)
        return packed.reshape(self.rows, self.queries, *packed.shape[1:])

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """`[rows, Q, heads, D]` to `[tokens, heads, D]`."""
        flat = padded.reshape(self.rows * self.queries, *padded.shape[2:])
        return flat if self.scatter is None else flat.index_select(0, self.scatter)


def decode_block(
    lengths: IntArray,
    counts: IntArray,
    hidden: Hidden | None,
    depths: IntArray | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Block:
    """Make the block of rows `[0, m)` with `lengths` valid keys and `counts` new tokens each.

    `hidden` pairs of new tokens get no attention; `depths` are `StepInputs.decode_depths`.
    """
    queries = int(counts.max())
    last_key = torch.from_numpy(lengths[:, None] + np.arange(queries)).to(device)
    keys = torch.arange(int((lengths + counts).max()), device=device)
    mask = torch.zeros((len(lengths), 1, queries, len(keys)), dtype=dtype, device=device)
    mask.masked_fill_(keys > last_key[:, None, :, None], float("-inf"))
    if hidden is not None and len(hidden[0]):
        row, query, key = hidden
        flat = (row * queries + query) * len(keys) + lengths[row] + key
        mask.view(-1).index_fill_(0, torch.from_numpy(flat).to(device), float("-inf"))
    tokens = int(counts.sum())
    scatter = _scatter(counts, queries, device)
    decoding = Decoding(lengths, counts, depths)
    return Block(0, len(lengths), queries, 0, tokens, scatter, mask, decoding)


def resumed_blocks(
    lengths: IntArray,
    counts: IntArray,
    *,
    first_row: int,
    first_token: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Block]:
    """Make a block for each row that is fed `counts` `[r]` tokens after `lengths` `[r]` valid keys.

    `first_row` and `first_token` are the slot and the token that the first block begins with.
    """
    blocks = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        block = decode_block(
            np.array([length], np.int32), np.array([count], np.int32), None,
            dtype=dtype, device=device,
        )  # fmt: skip
        block.first_row, block.first_token = first_row + row, first_token
        first_token += int(count)
        blocks.append(block)
    return blocks


def causal_blocks(
    lengths: IntArray, *, first_row: int, first_token: int, device: torch.device
) -> list[Block]:
    """Make blocks of fresh contexts in order, cut where padding would double a row's work."""
    blocks: list[Block] = []
    start = 0
    for end in range(1, len(lengths) + 1):
        shortest, longest = lengths[start:end].min(), lengths[start : end + 1].max()
        if end < len(lengths) and longest <= 2 * min(shortest, lengths[end]):
            continue
        counts = lengths[start:end]
        queries, tokens = int(counts.max()), int(counts.sum())
        scatter = _scatter(counts, queries, device)
        row = first_row + start
        blocks.append(Block(row, end - start, queries, first_token, tokens, scatter, None))
        first_token += tokens
        start = end
    return blocks


def _scatter(counts: IntArray, queries: int, device: torch.device) -> torch.Tensor | None:
    if bool((counts == queries).all()):
        return None
    index: NDArray[np.int64] = np.flatnonzero(np.arange(queries) < counts[:, None])
    return torch.from_numpy(index).to(device)
