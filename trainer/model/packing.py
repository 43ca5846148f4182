"""Packs sequences of different lengths into one row without padding, a shared prompt once.

`PackedBatch` says which tokens of the row are scored.

Linear layers, norms and activations see `[1, T]` real tokens. Only attention needs to know where a
sequence ends: `packed_attention`, registered with transformers under `ATTENTION_NAME`, spreads
queries, keys and values over `[B, H, L_max, D]`, in several blocks of similar lengths if the
padding would be large, runs causal SDPA, and gathers the real tokens again. It pads nothing on a
GPU in 16 bits (`asyncrl.trainer.model.varlen`) and on a CPU unless sequences are short
(`trainer.model.tiled_attention`). Positions restart at 0 in each sequence.

`capped_attention` serves models with capped scores or sinks, by the formula of
`asyncrl.rollout.model_parts`. It computes scores for a block of queries at a time and again in the
backward pass, so memory grows with the sequence, not its square, at three times a kernel's cost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from asyncrl.rollout.contexts import contexts_of
from asyncrl.rollout.model_parts import capped, weights_of
from asyncrl.rollout.trajectory import BoolArray, IntArray, Trajectory
from asyncrl.trainer.algorithms.base import to_device
from asyncrl.trainer.base.errors import UnsupportedModelError
from asyncrl.trainer.model import tiled_attention as tiled
from asyncrl.trainer.model import varlen

SCORE_BUDGET = 1 << 25
"""Scores (numbers) in memory at once."""
ATTENTION_NAME = "asyncrl_packed"
WORTHWHILE = 1024
"""Padded slots that several blocks must save to be used."""
_SIMILAR = 0.8
"""A block's sequences have at least this share of the tokens of its first one, and no more."""
_PLAIN_ARGUMENTS = {
    *("position_ids", "use_cache", "cache_position", "layer_idx", "output_attentions"),
    "output_router_logits",
}
"""Arguments of some models' attention calls that do not affect the result."""


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Map `query` `[B, H, L, D]`, `key` and `value` `[B, H_kv, L, D]` to `[B, H, L, D]`.

    The scale of the scores defaults to 1 / sqrt(D); `softcap` bounds them. A query sees `window`
    keys, its own among them, by default all. `sinks` `[H]` are scores of a key without a value.
    """
    batch, heads, length, size = query.shape
    groups = heads // key.shape[1]
    key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    scale = size**-0.5 if scale is None else scale
    rows = max(1, SCORE_BUDGET // (batch * heads * length))
    out = []
    for start in range(0, length, rows):
        end = min(length, start + rows)
        low = 0 if window is None else max(0, start + 1 - window)
        block = partial(_attend, first=start, low=low, scale=scale, window=window, softcap=softcap)
        parts = (query[:, :, start:end], key[:, :, low:end], value[:, :, low:end], sinks)
        if rows < length:
            block = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
        out.append(block(*parts))
    return out[0] if len(out) == 1 else torch.cat(out, 2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    *,
    first: int,
    low: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attend from queries at position `first` on to keys from position `low` on."""
    scores = query @ key.transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    scores = capped(scores, softcap)
    at = torch.arange(first, first + query.shape[2], device=query.device)[:, None]
    keys = torch.arange(low, low + key.shape[2], device=query.device)[None, :]
    hidden = keys > at
    if window is not None:
        hidden |= keys <= at - window
    scores = scores.masked_fill(hidden, -torch.inf)
    by_head = None if sinks is None else sinks.view(1, -1, 1, 1)
    return weights_of(scores, by_head).to(value.dtype) @ value


@dataclass(frozen=True, slots=True)
class Family:
    """Consecutive sequences in a row that share their first tokens."""

    sequences: int
    shared: int = 0
    """Number of shared first tokens; they come once, before the rest of each."""


class Block(NamedTuple):
    """Consecutive sequences that attention computes together, padded to the longest."""

    first: int
    last: int
    longest: int
    """Tokens of the longest sequence: slots of each."""
    start: int

    @property
    def slots(self) -> slice:
        """Slots of all sequences."""
        return slice(self.start, self.start + (self.last - self.first) * self.longest)


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of B sequences in a packed row of T tokens and in attention's S padded slots.

    Sequences may share their first tokens, as the samples of a group share their prompt. These come
    once in the row, before the rest of each sequence. Every sequence has them in the padded slots;
    only those of the family's first sequence are the tokens' own and receive attention's output.
    """

    positions: Tensor
    """`[1, T]` int64, from 0 in each sequence."""
    spread: Tensor
    """`[S]` int64: the packed token in each padded slot; 0 where there is none."""
    own: Tensor
    """`[S, 1, 1]` bool: True if the padded slot is a token's own."""
    gather: Tensor
    """`[T]` int64: each packed token's own padded slot."""
    blocks: tuple[Block, ...]
    """Blocks of the padded slots, in order."""
    longest: int
    segments: tuple[tuple[int, int, int, int], ...]
    """First token, one after the last, place in the row of what it shares, number of shared tokens;
    in the order of the row, without empty ones. Tokens attend to these and to their own segment."""
    families: tuple[tuple[int, int, int, int], ...]
    """Place in the row, number of tokens, first sequence, one after the last: of what is shared."""

    _keys: list[varlen.Keys] = field(default_factory=list)

    def keys(self) -> varlen.Keys:
        """Key layout for attention without padding; cached."""
        if not self._keys:
            self._keys.append(varlen.Keys.of(self.segments, self.positions.device))
        return self._keys[0]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, kin: Sequence[Family] = ()) -> Self:
        """Lay out sequences of these lengths (each at least 1), one after another.

        Families `kin` share at most their shortest sequence; they are all sequences, in order.
        """
        counts = np.asarray(lengths, np.int64)
        kin = kin or [Family(len(lengths))]
        sizes = [one.sequences for one in kin]
        shared = np.repeat([one.shared for one in kin], sizes)
        firsts = np.cumsum([0, *sizes])[:-1]
        rest = counts - shared
        own_tokens = rest.copy()
        own_tokens[firsts] += [one.shared for one in kin]  # the first one's are before its rest
        starts = np.cumsum(own_tokens) - rest
        prefix = np.repeat(starts[firsts] - shared[firsts], sizes)
        blocks = _blocks(counts.tolist())
        sizes_of_blocks = [one.last - one.first for one in blocks]
        widths = np.repeat([one.longest for one in blocks], sizes_of_blocks)
        sequence = np.repeat(np.arange(len(counts)), widths)
        column = np.arange(len(sequence)) - np.repeat(np.cumsum(widths) - widths, widths)
        real = column < counts[sequence]
        of_prefix = column < shared[sequence]
        spread = np.where(of_prefix, prefix[sequence], (starts - shared)[sequence]) + column
        spread[~real] = 0
        others = np.ones(len(counts), bool)
        others[firsts] = False
        own = real & ~(of_prefix & others[sequence])

        together = tuple(
            (int(prefix[first]), one.shared, int(first), int(first) + one.sequences)
            for one, first in zip(kin, firsts, strict=True)
            if one.shared
        )
        own_parts = [
            (start, start + count, place, tokens)
            for start, count, place, tokens in np.stack([starts, rest, prefix, shared], 1).tolist()
            if count
        ]

        def put(values: NDArray[Any]) -> Tensor:
            return to_device(values, device)

        return cls(
            positions=put(column[own])[None, :],
            spread=put(spread),
            own=put(own.reshape(-1, 1, 1)),
            gather=put(np.flatnonzero(own)),
            blocks=blocks,
            longest=int(counts.max()),
            segments=tuple(sorted([*own_parts, *((a, a + n, a, 0) for a, n, _, _ in together)])),
            families=together,
        )


def _blocks(counts: Sequence[int]) -> tuple[Block, ...]:
    """Divide sequences of these lengths into one block, or several if they save much padding."""
    whole = Block(0, len(counts), max(counts), 0)
    found: list[Block] = []
    first = start = 0
    for place in range(1, len(counts) + 1):
        top = counts[first]
        if place < len(counts) and _SIMILAR * top <= counts[place] <= top:
            continue
        found.append(Block(first, place, top, start))
        first, start = place, found[-1].slots.stop
    return tuple(found) if whole.slots.stop - start >= WORTHWHILE else (whole,)


class _Spread(torch.autograd.Function):
    """`[T, H, D]` to `[S, H, D]`; padding repeats token 0, and its gradient is dropped.

    The handwritten backward pass is a plain gather, plus a sum over the sequences for the tokens
    that they share. Autograd's would be a scatter-add over colliding indices.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return packed.index_select(0, layout.spread)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        layout = ctx.layout
        out = grads[0].index_select(0, layout.gather)
        for block in layout.blocks:
            slots = grads[0][block.slots].unflatten(0, (-1, block.longest))
            for place, shared, first, last in layout.families:
                others = slots[max(0, first + 1 - block.first) : max(0, last - block.first)]
                if len(others):
                    out[place : place + shared] += others[:, :shared].sum(0)
        return out, None


class _Gather(torch.autograd.Function):
    """The inverse of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return padded.index_select(0, layout.gather)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        layout = ctx.layout
        return grads[0].index_select(0, layout.spread).mul_(layout.own), None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed_layout: Layout | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence, by transformers' attention interface.

    `query` is `[1, H, T, D]`, `key` and `value` `[1, H_kv, T, D]`; returns `[1, T, H, D]`.
    `softcap` and `s_aux` (sinks) are those of `capped_attention`. Raises UnsupportedModelError if
    the model does not pass the layout on, or needs more (its own mask, non-causal attention).
    """
    kind = type(module).__name__
    if packed_layout is None:
        raise UnsupportedModelError(f"{kind} does not pass keyword arguments on to attention")
    if others.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{kind} is not causal")
    unknown = [k for k, v in others.items() if v is not None and k not in _PLAIN_ARGUMENTS]
    if attention_mask is not None or unknown:
        asked = ", ".join(unknown) or "its own attention mask"
        raise UnsupportedModelError(f"{kind} needs {asked}, which packed attention lacks")

    is_capped = softcap is not None or s_aux is not None
    if varlen.serves(query) and not is_capped:
        keys, window = packed_layout.keys(), sliding_window
        return varlen.attend(query, key, value, keys, scale=scaling, window=window), None
    sees_all = sliding_window is None or sliding_window >= packed_layout.longest
    if sees_all and not (is_capped or dropout) and tiled.serves(query, packed_layout.segments):
        return tiled.attend(query, key, value, packed_layout.segments, scale=scaling), None

    parts = [_spread(one, packed_layout) for one in (query, key, value)]
    padded: list[Tensor] = []
    for block, q, k, v in zip(packed_layout.blocks, *parts, strict=True):
        if is_capped:
            found = capped_attention(
                q, k, v, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux
            )
        else:
            mask = _window_mask(block.longest, sliding_window, query.device)
            options: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None}
            options |= {"dropout_p": dropout, "scale": scaling}
            shared = key.shape[1] != query.shape[1]
            found = scaled_dot_product_attention(q, k, v, enable_gqa=shared, **options)
        padded.append(found.transpose(1, 2).flatten(0, 1))
    whole = padded[0] if len(padded) == 1 else torch.cat(padded)
    return _Gather.apply(whole, packed_layout)[None], None


def _spread(packed: Tensor, layout: Layout) -> list[Tensor]:
    flat: Tensor = _Spread.apply(packed[0].transpose(0, 1), layout)
    sizes = [block.slots.stop - block.start for block in layout.blocks]
    parts = flat.split(sizes) if len(sizes) > 1 else [flat]
    return [
        part.unflatten(0, (-1, block.longest)).transpose(1, 2)
        for part, block in zip(parts, layout.blocks, strict=True)
    ]


def _window_mask(longest: int, window: int | None, device: torch.device) -> Tensor | None:
    """`[L, L]` bool: a causal band of `window` keys; None where plain causal attention is equal."""
    if window is None or window >= longest:
        return None
    ones = torch.ones(longest, longest, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)


AttentionInterface.register(ATTENTION_NAME, packed_attention)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """B sequences (prompt + response) in one row of T tokens, N of which are scored.

    Response tokens that a policy drew are scored. Observed ones are only in the row; the head is
    not computed for them. A prompt that consecutive sequences share is in the row once.
    """

    tokens: Tensor
    layout: Layout
    predictors: Tensor
    """`[N]` int64: position in the row whose hidden state predicts each scored token."""
    targets: Tensor
    """`[N]` int64."""

    @classmethod
    def of(
        cls,
        sequences: Sequence[tuple[IntArray, IntArray]],
        device: torch.device,
        trained: Sequence[BoolArray] | None = None,
    ) -> Self:
        """Pack (prompt `[P]`, response `[L]`) pairs in order; P and L at least 1.

        The last response token predicts nothing, so the row lacks it. A prompt that consecutive
        pairs share comes once, before their responses. `trained` `[L]` selects each response's
        scored tokens.
        """
        families: list[Family] = []
        rows: list[IntArray] = []
        predictors: list[NDArray[np.int64]] = []
        start = 0
        for prompt, alike in groupby_prompt(sequences):
            shared = len(prompt) if len(alike) > 1 else 0
            families.append(Family(len(alike), shared))
            before = start + len(prompt) - 1
            if shared:
                rows.append(prompt)
                start += shared
            for response in alike:
                if not shared:
                    rows.append(prompt)
                    start += len(prompt)
                    before = start - 1
                rows.append(response[:-1])
                places = np.arange(start - 1, start + len(response) - 1)
                places[0] = before
                predictors.append(places)
                start += len(response) - 1
        lengths = [len(prompt) + len(response) - 1 for prompt, response in sequences]
        targets = [response for _, response in sequences]
        masks = [slice(None)] * len(targets) if trained is None else trained
        return cls(
            tokens=to_device(np.concatenate(rows).astype(np.int64), device)[None, :],
            layout=Layout.of(lengths, device, families),
            predictors=to_device(_joined(predictors, masks), device),
            targets=to_device(_joined(targets, masks), device),
        )

    @classmethod
    def of_samples(
        cls, trajectories: Sequence[Trajectory], device: torch.device, *, one_more: bool = False
    ) -> Self:
        """Pack the contexts of samples, in order; `one_more` as in `contexts_of`."""
        contexts = [c for one in trajectories for c in contexts_of(one, one_more=one_more)]
        pairs = [(one.prompt, one.response) for one in contexts]
        return cls.of(pairs, device, [one.trained for one in contexts])


def _joined(parts: Sequence[NDArray[Any]], masks: Sequence[BoolArray | slice]) -> NDArray[np.int64]:
    chosen = [part[mask] for part, mask in zip(parts, masks, strict=True)]
    found: NDArray[np.int64] = np.concatenate(chosen).astype(np.int64)
    return found


def groupby_prompt(
    sequences: Sequence[tuple[IntArray, IntArray]],
) -> Iterator[tuple[IntArray, list[IntArray]]]:
    """Group consecutive sequences by equal prompts, with their responses."""
    for _, pairs in groupby(sequences, key=lambda pair: pair[0].tobytes()):
        prompts, responses = zip(*pairs, strict=True)
        yield prompts[0], list(responses)
