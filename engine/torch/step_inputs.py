"""The tokens of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncrl.engine.drafting.trees import TokenTrees
from asyncrl.engine.torch.attention_mask import Hidden
from asyncrl.engine.torch.rows import NewRows, Rows
from asyncrl.rollout.trajectory import IntArray


@dataclass(frozen=True, slots=True)
class Feed:
    """Decoding rows `[0, m)`, then new rows with whole contexts."""

    decode_tokens: IntArray
    """`[sum(decode_counts)]` each decoding row's last token and its drafts, row by row."""
    decode_counts: IntArray
    """`[m]` tokens per decoding row, at least 1."""
    decode_lengths: IntArray
    """`[m]` valid keys of each decoding row."""
    new_tokens: IntArray
    """`[sum(new_lengths)]` whole contexts, best sorted by length; of resumed rows, which come
    first, what follows the keys that they have."""
    new_lengths: IntArray
    """`[r]`; these rows take slots m .. m + r - 1."""
    new_starts: IntArray | None = None
    """`[r]` valid keys of each of these rows; None: none."""
    new_wanted: IntArray | None = None
    """`[r]` how many last tokens of each new row need logits; None: one each."""
    decode_depths: IntArray | None = None
    """`[sum(decode_counts)]` positions after the row's first new token where rows are token trees;
    None: chains, each token one position after the one before it."""
    hidden: Hidden | None = None
    """Pairs of a row's new tokens on different paths of its tree, see `slots.decode_block`."""

    @classmethod
    def of(cls, rows: Rows, trees: TokenTrees, new: NewRows) -> Feed:
        """What a step feeds: decoding rows' last tokens with their trees, and new contexts."""
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
