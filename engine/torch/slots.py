"""KV slots, the layout of one step's tokens, and attention over both.

A step's tokens are packed into one sequence `[1, T]`, so that the model's linear layers never see
padding: first every decoding row's last token and drafts, row by row, then whole new contexts.
Only attention depends on rows. It is registered with transformers as an attention backend, so that
any model built on that interface runs here unchanged.

Legend of shapes: S slots, n running rows, T packed tokens, Q queries of a row (padded), L keys,
H query heads, J key/value heads, G = H / J, D head size.

    slot   0..m-1   decoding rows: Q = 1 + drafts, keys from their slots, explicit mask
    slot   m..n-1   new rows: Q = context length, keys are the queries' own, causal
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache

from engine.errors import EngineError
from engine.torch.invariant import attention_within
from engine.torch.reach import Hidden, Reach
from rollout.trajectory import IntArray


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
    """`[tokens]` index of each packed token in `[rows * Q]`; None where no row is shorter."""
    mask: torch.Tensor | None
    """`[rows, 1, Q, L]` additive; None: causal over the block's own tokens (a fresh context)."""
    _grouped: dict[int, torch.Tensor] = field(default_factory=dict)

    def grouped_mask(self, groups: int) -> torch.Tensor:
        """`[rows, 1, G * Q, L]` for queries whose G heads per key head are folded into Q."""
        if self.mask is None:
            raise ValueError("a causal block has no mask")
        if groups not in self._grouped:
            m, _, q, length = self.mask.shape
            wide = self.mask.unsqueeze(2).expand(m, 1, groups, q, length)
            self._grouped[groups] = wide.reshape(m, 1, groups * q, length)
        return self._grouped[groups]

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


@dataclass(slots=True)
class StepLayout:
    """Where each packed token of one forward pass belongs."""

    input_ids: torch.Tensor
    """`[1, T]`"""
    positions: torch.Tensor
    """`[1, T]` position in its row's context."""
    places: torch.Tensor
    """`[T]` place in the row's slot: the position, except for nodes of a forked token tree."""
    rows: torch.Tensor
    """`[T]` slot of each token."""
    blocks: list[Block]
    """What attention runs, unless there is a `reach`."""
    reach: Reach | None = None
    """For batch-invariant attention; `input_ids` and `positions` are then padded."""


class SlotCache(Cache):
    """Keys and values of every running row: per layer `[S, J, max_len, D]`.

    Rows `[0, n)` are the running ones, so a step reads a view and never a copy. Slots are allocated
    on the first forward pass, when the shapes are known, and zeroed: an uninitialised NaN would
    survive a mask.
    """

    def __init__(self, slots: int, max_len: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.max_len = max_len
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.plan: StepLayout | None = None
        self.current_layer = 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_args: object,
        **_kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[1, J, T, D]` to the places of the plan, and return it unchanged for attention.

        Tokens after those of the plan are padding and written nowhere.
        """
        if self.plan is None:
            raise EngineError(
                "KV slots were written outside a step; run the model through SlotModel"
            )
        while len(self.keys) <= layer_idx:
            for stored, new in ((self.keys, key_states), (self.values, value_states)):
                shape = (self.slots, new.shape[1], self.max_len, new.shape[3])
                stored.append(torch.zeros(shape, dtype=new.dtype, device=new.device))
        rows, places = self.plan.rows, self.plan.places
        real = slice(len(rows))
        self.keys[layer_idx][rows, :, places] = key_states[0, :, real].transpose(0, 1)
        self.values[layer_idx][rows, :, places] = value_states[0, :, real].transpose(0, 1)
        self.current_layer = layer_idx
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002  (transformers' signature)
        """0: rows differ in length, and positions are always given."""
        return 0

    def join_layers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all layers: `[layers, S, J, max_len, D]` each; the slots become views.

        The slots must be allocated. What they hold is lost: their memory is freed before that of
        all layers is allocated, so a start never needs twice the memory of the slots.
        """
        joined = []
        for stored in (self.keys, self.values):
            shape = (len(stored), *stored[0].shape)
            dtype, device = stored[0].dtype, stored[0].device
            stored.clear()
            joined.append(torch.zeros(shape, dtype=dtype, device=device))
            stored.extend(joined[-1])
        keys, values = joined
        return keys, values

    def copy_row(self, source: int, targets: range, length: int) -> None:
        """Copy the first `length` positions of one slot into others, which are adjacent."""
        at = slice(targets.start, targets.stop)
        for stored in (*self.keys, *self.values):
            stored[at, :, :length] = stored[source, :, :length]

    def move(
        self, rows: NDArray[np.integer], sources: NDArray[np.integer], targets: NDArray[np.integer]
    ) -> None:
        """Copy single places within slots, `[M]` each. All are read before any is written."""
        if not self.keys:
            return
        where = np.stack([rows, sources, targets]).astype(np.int64)
        row, source, target = torch.from_numpy(where).to(self.keys[0].device)
        for stored in (*self.keys, *self.values):
            stored[row, :, target] = stored[row, :, source]


class SlotAttention:
    """The attention backend: queries of a packed step against slots or their own context."""

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        self.plan: StepLayout | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # noqa: ARG002  (the plan's masks are used instead)
        scaling: float | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        """Attend. `query` `[1, H, T, D]`, `key` and `value` `[1, J, T, D]`; gives `[1, T, H, D]`.

        Raises:
            EngineError: the model asks for something that slots cannot represent.
        """
        if self.plan is None:
            raise EngineError(
                "attention was called outside a step; run the model through SlotModel"
            )
        _refuse_unsupported(module, kwargs, self._cache.max_len)
        reach = self.plan.reach
        if reach is not None:
            if not reach.packed:
                layer = self._cache.current_layer
                key, value = self._cache.keys[layer], self._cache.values[layer]
            return attention_within(reach, query[0], key, value, scaling)[None], None
        out = []
        for block in self.plan.blocks:
            span = slice(block.first_token, block.first_token + block.tokens)
            q = block.pad(query[0, :, span].transpose(0, 1))
            if block.mask is None:
                k = block.pad(key[0, :, span].transpose(0, 1))
                v = block.pad(value[0, :, span].transpose(0, 1))
                attended = _causal(q, k, v, scaling)
            else:
                attended = self._over_slots(block, q, scaling)
            out.append(block.unpad(attended))
        return (out[0] if len(out) == 1 else torch.cat(out)).unsqueeze(0), None

    def _over_slots(self, block: Block, q: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """`[m, Q, H, D]` against the slots of the block's rows.

        Heads that share a key head are folded into the query axis, so that slots are read in place.
        The usual `repeat_kv` would copy all of them in every layer of every step.
        """
        layer = self._cache.current_layer
        rows = slice(block.first_row, block.first_row + block.rows)
        length = 0 if block.mask is None else block.mask.shape[-1]
        k = self._cache.keys[layer][rows, :, :length]
        v = self._cache.values[layer][rows, :, :length]
        m, queries, heads, size = q.shape
        kv_heads = k.shape[1]
        groups = heads // kv_heads
        folded = q.view(m, queries, kv_heads, groups, size).permute(0, 2, 3, 1, 4)
        out = scaled_dot_product_attention(
            folded.reshape(m, kv_heads, groups * queries, size),
            k,
            v,
            attn_mask=block.grouped_mask(groups),
            scale=scaling,
        )
        out = out.view(m, kv_heads, groups, queries, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(m, queries, heads, -1)


def _refuse_unsupported(module: torch.nn.Module, kwargs: dict[str, object], max_len: int) -> None:
    """Raise EngineError for attention that slots of `max_len` places cannot represent.

    Args:
        module: the attention layer.
        kwargs: what it passes to the attention backend.
        max_len: places of a slot.
    """
    window = kwargs.get("sliding_window")
    if isinstance(window, int) and window < max_len:
        raise EngineError(
            f"{type(module).__name__} attends to a window of {window} tokens, fewer than "
            f"engine.max_model_len={max_len}, which KV slots do not support"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise EngineError(
                f"{type(module).__name__} needs attention with {name!r}, which is not supported"
            )


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Rows `[m, Q, heads, D]` over themselves. Padding comes last, so no real query sees it."""
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        scale=scaling,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def decode_block(
    lengths: IntArray,
    counts: IntArray,
    hidden: Hidden | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Block:
    """Rows `[0, m)` with `lengths` valid keys each and `counts` new tokens each.

    Args:
        lengths: `[m]`
        counts: `[m]`
        hidden: pairs of new tokens without attention; None: no such pairs.
        dtype: of the mask.
        device: of all tensors.
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
    return Block(0, len(lengths), queries, 0, tokens, _scatter(counts, queries, device), mask)


def causal_blocks(
    lengths: IntArray, *, first_row: int, first_token: int, device: torch.device
) -> list[Block]:
    """Blocks of fresh contexts in the order given, cut where padding would double a row's work.

    Contexts sorted by length give few blocks and little padding.
    """
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
