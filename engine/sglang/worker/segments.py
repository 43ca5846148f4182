"""The keys of a forward pass, row by row: computed once, used by all layers. Imports no SGLang."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

Index = NDArray[np.int64]

_TOGETHER = 64
"""Most rows of one token that are attended in one piece."""
_WASTE = 1.25
"""The longest of them has at most this many times the keys of the shortest (and 32 more)."""


@dataclass(frozen=True, slots=True)
class Singles:
    """Rows of one token, padded to one length."""

    tokens: torch.Tensor
    """`[b]` their tokens in the batch."""
    slots: torch.Tensor
    """`[b, L]` KV slots of each row's keys, then any."""
    mask: torch.Tensor | None
    """`[b, 1, 1, L]` keys that exist; None: all."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Several tokens of one row."""

    first: int
    """Its first token in the batch."""
    last: int
    """One after its last token."""
    slots: torch.Tensor
    """`[L]` KV slots of the row's keys, its own tokens last."""
    mask: torch.Tensor | None
    """`[tokens, L]` keys that each may attend to; None: the row has no other keys, causal."""


@dataclass(frozen=True, slots=True)
class Segments:
    """All tokens of a forward pass."""

    singles: tuple[Singles, ...]
    others: tuple[Segment, ...]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None:
        """Attend with all tokens.

        `q` is `[T, H, D]`, `k` `[slots, H_kv, D]` and `v` `[slots, H_kv, D_v]` the whole pool;
        `out` `[T, H, D_v]` is set.
        """
        kv_heads = k.shape[1]
        for part in self.singles:
            b = len(part.tokens)
            # The queries of one KV head stand where several tokens would.
            query = q[part.tokens].view(b, kv_heads, -1, q.shape[-1])
            got = scaled_dot_product_attention(
                query,
                k[part.slots].transpose(1, 2),
                v[part.slots].transpose(1, 2),
                attn_mask=part.mask,
                scale=scale,
            )
            out[part.tokens] = got.reshape(b, q.shape[1], -1)
        for one in self.others:
            got = scaled_dot_product_attention(
                q[one.first : one.last].transpose(0, 1)[None],
                k[one.slots].transpose(0, 1)[None],
                v[one.slots].transpose(0, 1)[None],
                attn_mask=one.mask,
                is_causal=one.mask is None,
                scale=scale,
                enable_gqa=q.shape[1] != kv_heads,
            )
            out[one.first : one.last] = got[0].transpose(0, 1)


def segments_of(
    table: torch.Tensor,
    contexts: Index,
    counts: Index,
    masks: dict[int, NDArray[np.bool_]] | None = None,
) -> Segments:
    """Describe a forward pass of n rows.

    `table` `[n, >= context + count]` has the KV slots of each row's text: `contexts` `[n]` tokens
    have KV already, `counts` `[n]` are fed. `masks` maps rows to the mask `[count, count]` among
    their fed tokens; other rows attend causally.
    """
    masks = masks or {}
    lengths = contexts + counts
    starts = np.cumsum(counts) - counts
    single = np.flatnonzero(counts == 1)
    singles = tuple(_singles(table, rows, lengths, starts) for rows in _alike(single, lengths))
    others = tuple(
        Segment(
            int(starts[row]),
            int(starts[row] + counts[row]),
            table[row, : lengths[row]].long(),
            _mask(int(contexts[row]), int(counts[row]), masks.get(row)),
        )
        for row in np.flatnonzero(counts > 1).tolist()
    )
    return Segments(singles, others)


def _alike(rows: Index, lengths: Index) -> Iterator[Index]:
    rows = rows[np.argsort(lengths[rows], kind="stable")]
    first = 0
    for end in range(1, len(rows) + 1):
        full = end - first == _TOGETHER
        if end == len(rows) or full or lengths[rows[end]] > _WASTE * lengths[rows[first]] + 32:
            yield rows[first:end]
            first = end


def _singles(table: torch.Tensor, rows: Index, lengths: Index, starts: Index) -> Singles:
    mine = lengths[rows]
    longest = int(mine.max())
    inside = np.arange(longest) < mine[:, None]
    slots = table[torch.from_numpy(rows), :longest].long()
    if inside.all():
        return Singles(torch.from_numpy(starts[rows]), slots, None)
    keys = torch.from_numpy(inside)
    # Slots after a row's text may be stale: slot 0 exists, and is masked.
    return Singles(torch.from_numpy(starts[rows]), slots * keys, keys[:, None, None])


def _mask(context: int, count: int, own: NDArray[np.bool_] | None) -> torch.Tensor | None:
    if own is None and not context:
        return None
    mask = torch.ones(count, context + count, dtype=torch.bool)
    mask[:, context:] = torch.from_numpy(np.tri(count, dtype=np.bool_) if own is None else own)
    return mask


def visible(
    counts: Index, query: Sequence[int] | Index, key: Sequence[int] | Index
) -> dict[int, NDArray[np.bool_]]:
    """Return the `masks` of the rows that hide something from their own tokens.

    Rows feed `counts` `[n]` tokens; fed token query[m] of the batch must not attend to key[m].
    """
    starts = np.cumsum(counts) - counts
    query, key = np.asarray(query, np.int64), np.asarray(key, np.int64)
    row = np.searchsorted(starts, query, side="right") - 1
    masks = {}
    for one in np.unique(row).tolist():
        masks[one] = np.tri(int(counts[one]), dtype=np.bool_)
        mine = row == one
        masks[one][query[mine] - starts[one], key[mine] - starts[one]] = False
    return masks
