"""KV slots, the layout of one step's tokens, and attention over both.

A step's tokens are packed into one sequence `[1, T]`: first every decoding row's last token and
drafts, row by row, then whole new contexts. Only attention, an attention backend of transformers,
depends on rows.

Legend of shapes: S slots, n running rows, T packed tokens, Q queries of a row (padded), L keys, H
query heads, J key/value heads, G = H / J, D head size.

    slot   0..m-1   decoding rows: Q = 1 + drafts, keys from their slots, explicit mask
    slot   m..n-1   new rows: Q = context length, keys are the queries' own, causal
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from asyncrl.engine.drafting.trees import TokenTrees
from asyncrl.engine.errors import EngineError
from asyncrl.engine.torch.attention import AttendedKeys, Block, Hidden, ScoreRule, attend, causal
from asyncrl.engine.torch.cpu.invariant_attention import attention_within
from asyncrl.engine.torch.rows import NewRows, Rows
from asyncrl.rollout.trajectory import IntArray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Decoding rows `[0, m)`, then new rows with whole contexts."""

    decode_tokens: IntArray
    """`[sum(decode_counts)]` each decoding row's last token and its drafts, row by row."""
    decode_counts: IntArray
    """`[m]` tokens per decoding row, at least 1."""
    decode_lengths: IntArray
    """`[m]` valid keys of each decoding row."""
    new_tokens: IntArray
    """`[sum(new_lengths)]` whole contexts, best sorted by length; resumed rows, which come first,
    only have the tokens after their valid keys."""
    new_lengths: IntArray
    """`[r]`; these rows take slots m .. m + r - 1."""
    new_starts: IntArray | None = None
    """`[r]` valid keys of each of these rows; None: none."""
    new_wanted: IntArray | None = None
    """`[r]` number of last tokens of each new row that need logits; None: one each."""
    decode_depths: IntArray | None = None
    """`[sum(decode_counts)]` positions after the row's first new token if rows are token trees;
    None: chains, each token one position after the previous one."""
    hidden: Hidden | None = None
    """Pairs of a row's new tokens on different paths of its tree, see `attention.decode_block`."""

    @classmethod
    def of(cls, rows: Rows, trees: TokenTrees, new: NewRows) -> StepInputs:
        """Make a step's feed: decoding rows' last tokens with their trees, and new contexts."""
        decoding = new.decoding
        last = rows.tokens[np.arange(decoding), rows.total[:decoding] - 1]
        root = np.zeros(decoding, np.int32)
        return cls(
            decode_tokens=trees.fed(last, trees.tokens),
            decode_counts=trees.counts,
            decode_lengths=rows.kv_length[:decoding],
            new_tokens=rows.contexts(new),
            new_lengths=new.lengths,
            new_starts=new.starts if new.resumed else None,
            new_wanted=new.wanted,
            decode_depths=trees.fed(root, trees.depths) if trees.forked else None,
            hidden=trees.hidden() if trees.forked else None,
        )


@dataclass(slots=True)
class StepLayout:
    """Positions and slots of the packed tokens of one forward pass."""

    input_ids: torch.Tensor
    """`[1, T]`"""
    positions: torch.Tensor
    """`[1, T]` position in its row's context."""
    places: torch.Tensor
    """`[T]` place in the row's slot: the position, except for nodes of a forked token tree."""
    rows: torch.Tensor
    blocks: list[Block]
    """Blocks of attention, unless there is a `reach`."""
    reach: AttendedKeys | None = None
    """Set for batch-invariant attention; `input_ids` and `positions` are then padded."""
    _within: dict[int, AttendedKeys] = field(default_factory=dict)

    def reach_within(self, window: int | None) -> AttendedKeys:
        """Return `reach`, limited to the last `window` positions before each token; None: all."""
        assert self.reach is not None  # noqa: S101 - callers ask for it first
        if window is None:
            return self.reach
        if window not in self._within:
            positions = self.positions[0, : len(self.places)].numpy()
            self._within[window] = self.reach.within_window(positions, window)
        return self._within[window]


class SlotCache(Cache):
    """Keys and values of every running row: per layer `[S, J, max_len, D]`.

    Rows `[0, n)` are the running ones. Slots are allocated on the first forward pass, when the
    shapes are known, and zeroed: an uninitialised NaN would survive a mask.
    """

    def __init__(self, slots: int, max_len: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.max_len = max_len
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._joined: tuple[torch.Tensor, ...] = ()
        """Keys and values of all layers, if they are joined."""
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
        """Write `[1, J, T, D]` to the places of the plan, without padding, and return it."""
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
        """Return 0: rows differ in length, and positions are always given."""
        return 0

    def join_layers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Join keys and values of all layers in `[layers, S, J, max_len, D]`; slots become views.

        The slots must be allocated. Their content is lost: they are freed first, to save memory.
        """
        joined = []
        for stored in (self.keys, self.values):
            shape = (len(stored), *stored[0].shape)
            dtype, device = stored[0].dtype, stored[0].device
            stored.clear()
            joined.append(torch.zeros(shape, dtype=dtype, device=device))
            stored.extend(joined[-1])
        keys, values = self._joined = joined[0], joined[1]
        return keys, values

    def copy_row(self, source: int, targets: range, length: int) -> None:
        """Copy the first `length` positions of one slot into others, which are adjacent."""
        at = slice(targets.start, targets.stop)
        for stored in (*self.keys, *self.values):
            stored[at, :, :length] = stored[source, :, :length]

    def move_rows(
        self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Copy the first `lengths[i]` positions of slots into others; all are read before."""
        moved = [one for one in zip(sources, targets, lengths, strict=True) if one[0] != one[1]]
        if not moved:
            return
        for stored in self._joined or (one[None] for one in (*self.keys, *self.values)):
            read = [stored[:, source, :, :length] for source, _, length in moved]
            if len(moved) > 1:
                read = [one.clone() for one in read]
            for values, (_, target, length) in zip(read, moved, strict=True):
                stored[:, target, :, :length] = values

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
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        """Attend. `query` `[1, H, T, D]`, `key` and `value` `[1, J, T, D]`; gives `[1, T, H, D]`.

        Raises EngineError if the model asks for something that slots cannot represent.
        """
        plan = self.plan
        if plan is None:
            raise EngineError(
                "attention was called outside a step; run the model through SlotModel"
            )
        if kwargs.get("position_bias") is not None:
            raise EngineError(f"{type(module).__name__} has a position bias, which KV slots lack")
        window = sliding_window
        if window is not None and window >= self._cache.max_len:
            window = None
        rule = ScoreRule(scaling, window, softcap, s_aux)
        if plan.reach is not None:
            if not plan.reach.packed:
                layer = self._cache.current_layer
                key, value = self._cache.keys[layer], self._cache.values[layer]
            reach = plan.reach_within(window)
            return attention_within(reach, query[0], key, value, rule)[None], None
        out = []
        for block in plan.blocks:
            span = slice(block.first_token, block.first_token + block.tokens)
            q = block.pad(query[0, :, span].transpose(0, 1))
            if block.mask is None:
                k = block.pad(key[0, :, span].transpose(0, 1))
                v = block.pad(value[0, :, span].transpose(0, 1))
                attended = causal(q, k, v, rule)
            else:
                attended = self._over_slots(block, q, rule)
            out.append(block.unpad(attended))
        return (out[0] if len(out) == 1 else torch.cat(out)).unsqueeze(0), None

    def _over_slots(self, block: Block, q: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
        """Attend with `[m, Q, H, D]` to the slots of the block's rows.

        Heads that share a key head are folded into the query axis, so that slots are read in place.
        """
        layer = self._cache.current_layer
        rows = slice(block.first_row, block.first_row + block.rows)
        k, v = self._cache.keys[layer][rows], self._cache.values[layer][rows]
        m, queries, heads, size = q.shape
        kv_heads = k.shape[1]
        groups = heads // kv_heads
        mask = block.grouped_mask(groups, rule.window)
        k, v = k[:, :, : mask.shape[-1]], v[:, :, : mask.shape[-1]]
        folded = q.view(m, queries, kv_heads, groups, size).permute(0, 2, 3, 1, 4)
        out = attend(folded.reshape(m, kv_heads, groups * queries, size), k, v, mask, rule)
        out = out.view(m, kv_heads, groups, queries, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(m, queries, heads, -1)
