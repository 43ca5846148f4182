"""The keys that each token attends to, and attention under a mask and a layer's score rule.

A `Block` is adjacent rows of a forward pass, computed as a padded batch. torch's kernels compute
plain scores. Capped ones and sinks are written out (`asyncrl.rollout.model_parts`), and so take
several times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.rollout.model_parts import capped, weights_of
from asyncrl.rollout.trajectory import IntArray

Hidden = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Row, query and key of masked pairs among a row's new tokens, both counted from its first one."""
SCORE_BUDGET = 1 << 25
"""Scores (numbers) of a fresh context in memory at once, if they are written out or masked."""


class AttendedKeys(NamedTuple):
    """The keys of T packed tokens: `first` to `last` `[T]` of `slot` `[T]` but the hidden ones."""

    slot: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    """`[T]` the token's place."""
    base: NDArray[np.int64]
    """`[T]` place of its row's first new token; column 0 of `hidden`."""
    hidden: NDArray[np.bool_]
    """`[T, Q]` new tokens of its row on other paths of its tree; `[T, 0]`: none."""
    packed: bool
    """True if the keys are the packed tokens themselves, as one slot; otherwise those of slots."""

    @classmethod
    def over_slots(
        cls,
        slot: NDArray[np.int64],
        place: NDArray[np.int64],
        lengths: IntArray,
        counts: IntArray,
        pairs: Hidden | None,
    ) -> AttendedKeys:
        """Let a step's tokens see the keys of their slots up to their own places, `[T]` each.

        Rows that decode come first, with `lengths` `[m]` valid keys and `counts` `[m]` new tokens;
        `pairs` are hidden among these; None: nothing.
        """
        base = np.zeros_like(place)
        hidden = np.zeros((len(place), 0), np.bool_)
        if pairs is not None and len(pairs[0]):
            row, query, key = pairs
            base[: int(counts.sum())] = np.repeat(lengths, counts)
            hidden = np.zeros((len(place), int(counts.max())), np.bool_)
            hidden[(np.cumsum(counts) - counts)[row] + query, key] = True
        return cls(slot, np.zeros_like(place), place, base, hidden, packed=False)

    @classmethod
    def within(cls, lengths: NDArray[np.integer]) -> AttendedKeys:
        """Pack whole contexts of `[r]` lengths one after another, without slots."""
        tokens = np.arange(int(lengths.sum()))
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths).astype(np.int64)
        hidden = np.zeros((len(tokens), 0), np.bool_)
        return cls(np.zeros_like(tokens), starts, tokens, starts, hidden, packed=True)

    def within_window(self, positions: NDArray[np.int64], window: int) -> AttendedKeys:
        """Drop keys `window` or more positions before their token; `positions` are `[T]`."""
        oldest = positions - (window - 1)
        first, hidden = np.maximum(self.first, self.first + oldest), self.hidden
        in_tree = np.flatnonzero(self.base > 0) if hidden.shape[1] else np.empty(0, np.int64)
        if len(in_tree):
            # Places are positions up to `base` only. After it, old keys are hidden.
            first[in_tree] = np.clip(oldest[in_tree], 0, self.base[in_tree])
            row = in_tree - (self.last[in_tree] - self.base[in_tree])
            columns = np.minimum(row[:, None] + np.arange(hidden.shape[1]), len(positions) - 1)
            hidden = hidden.copy()
            hidden[in_tree] |= positions[columns] < oldest[in_tree, None]
        return self._replace(first=first, hidden=hidden)


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """A layer's rule for attention scores."""

    scaling: float | None = None
    """Scale of scores; None: by the square root of D."""
    window: int | None = None
    """Keys that a query sees, including its own; None: all before it."""
    softcap: float | None = None
    """Bound of scores; None: none."""
    sinks: torch.Tensor | None = None
    """`[H]` score of a key without a value; None: none."""

    @property
    def is_written_out(self) -> bool:
        """True if torch has no kernel for it."""
        return self.softcap is not None or self.sinks is not None


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """Attend under a mask, ignoring the rule's window; return `[m, J, G * Q, E]`.

    `query` is `[m, J, G * Q, D]`, the G query heads of a key head one after another, `key` `[m, J,
    L, D]`, `value` `[m, J, L, E]`, and `mask` `[m or 1, 1, G * Q, L]` additive.
    """
    if not rule.is_written_out:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=rule.scaling)
    _, kv_heads, folded, size = query.shape
    scores = query @ key.transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = capped(scores * (size**-0.5 if rule.scaling is None else rule.scaling), rule.softcap)
    scores += mask
    sinks = rule.sinks
    if sinks is not None:
        groups = len(sinks) // kv_heads
        sinks = sinks.view(kv_heads, groups).repeat_interleave(folded // groups, 1)
        sinks = sinks[None, :, :, None]
    return weights_of(scores, sinks).to(value.dtype) @ value


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
    """Attend causally within rows `[m, Q, heads, D]`, whose padding comes last."""
    query, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    length = query.shape[2]
    has_window = rule.window is not None and rule.window < length
    if has_window or rule.is_written_out:
        return _causal_in_parts(query, key, value, rule).transpose(1, 2)
    out = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=rule.scaling, enable_gqa=q.shape[2] != k.shape[2]
    )
    return out.transpose(1, 2)


def _causal_in_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """Attend causally within `[m, H, Q, D]`, some queries at a time with the keys that they see."""
    m, heads, length, size = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    many = max(1, SCORE_BUDGET // (m * heads * length))
    out = []
    for start in range(0, length, many):
        end = min(length, start + many)
        low = 0 if rule.window is None else max(0, start + 1 - rule.window)
        at = torch.arange(start, end, device=query.device)[:, None]
        keys = torch.arange(low, end, device=query.device)[None, :]
        hidden = keys > at
        if rule.window is not None:
            hidden |= keys <= at - rule.window
        mask = query.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        part = query[:, :, start:end].reshape(m, kv_heads, groups * (end - start), size)
        wide = mask.repeat(groups, 1)[None, None]
        attended = attend(part, key[:, :, low:end], value[:, :, low:end], wide, rule)
        out.append(attended.view(m, heads, end - start, -1))
    return torch.cat(out, 2)


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
        """Return the mask `[rows, 1, G * Q, L]` for G query heads per key head folded into Q.

        Keys that are `window` positions or more before their query are masked, too.
        """
        if self.mask is None or self.decoding is None:
            raise ValueError("a causal block has no mask")
        if (groups, window) not in self._grouped:
            mask = self.mask
            if window is not None:
                queries, keys = self.decoding.positions(*mask.shape[2:])
                if queries.max(initial=0) >= window:
                    far = torch.from_numpy(keys[:, None, :] <= queries[:, :, None] - window)
                    mask = mask.masked_fill(far[:, None].to(mask.device), float("-inf"))
            m, _, q, length = mask.shape
            wide = mask.unsqueeze(2).expand(m, 1, groups, q, length)
            self._grouped[groups, window] = wide.reshape(m, 1, groups * q, length)
        return self._grouped[groups, window]

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
