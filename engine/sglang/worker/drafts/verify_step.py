"""The layout of trees fed to SGLang's model, and the accepted paths. Imports no SGLang.

A decode step feeds each row its last token and its drafted nodes. A row's KV slots are those that
follow its context in SGLang's pool (`req_to_token`), in the order of feeding:

    row's context   ... c - 1 | c: last token   c + 1: node 0   c + 2: node 1   ...
    fed places                  0               1               2

*Ragged* feeding takes one place per token: a row without drafts costs one token. *Uniform* feeding
gives all rows the places of the longest one, which kernels with fixed strides need; nothing attends
to, draws from or accepts the padding.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.drafting.trees import TokenTrees
from asyncrl.rollout.acceptance import AcceptedPaths
from asyncrl.rollout.trajectory import IntArray

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Feed:
    """The T tokens of a step with n rows, row after row."""

    tokens: IntArray
    """`[T]`"""
    row: Index
    """`[T]`"""
    place: Index
    """`[T]` counted from the row's last token, 0."""
    positions: Index
    counts: Index
    """`[n]` places of each row; their sum is T."""
    real: Index | None
    """`[n + N]` indices among the T of last tokens and nodes, in order; None: all."""

    @property
    def width(self) -> int:
        """Places of the longest row."""
        return int(self.counts.max(initial=1))


def lay_out(trees: TokenTrees, last: IntArray, contexts: Index, *, ragged: bool) -> Feed:
    """Lay out `last` `[n]` and trees after `contexts` `[n]` tokens, uniform or `ragged`."""
    counts = trees.counts.astype(np.int64)
    tokens = trees.fed(last, trees.tokens)
    row, place = _places(counts)
    positions = contexts[row] + trees.fed(np.zeros_like(last), trees.depths)
    if ragged or (counts == counts.max(initial=1)).all():
        return Feed(tokens, row, place, positions, counts, None)
    width = int(counts.max())
    real = row * width + place
    row, place = _places(np.full(len(counts), width, np.int64))
    padded = np.repeat(last, width)
    padded[real] = tokens
    at = contexts[row] + place
    at[real] = positions
    return Feed(padded, row, place, at, np.full(len(counts), width, np.int64), real)


def _places(counts: Index) -> tuple[Index, Index]:
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]


def roots(trees: TokenTrees) -> Index:
    """Return `[n]` indices of the rows' last tokens among all last tokens and nodes, in order."""
    found: Index = trees.offsets[:-1].astype(np.int64) + np.arange(trees.rows)
    return found


def places_in(trees: TokenTrees, width: int) -> Index:
    """Return `[n + N]` places of last tokens and nodes in a flat table `[n, width]`."""
    row, place = _places(trees.counts.astype(np.int64))
    return row * width + place


def paths_of(walks: AcceptedPaths, trees: TokenTrees) -> tuple[Index, Index]:
    """Convert walks to tables, `path` and `counts`.

    `path` `[n, 1 + depth of the deepest tree]` are the places whose draws are generated, 0 first;
    after the end of a row's path, its last place. `counts` `[n]` are the generated tokens of each.
    """
    counts = walks.accepted.astype(np.int64) + 1
    row, step = _places(counts)
    path = np.zeros((trees.rows, 1 + int(trees.depths.max(initial=0))), np.int64)
    path[row, step] = walks.draws - roots(trees)[row]
    return np.maximum.accumulate(path, axis=1), counts


def accepted_nodes(trees: TokenTrees, path: Index, counts: Index) -> NDArray[np.bool_]:
    """Return `[N]` whether each node is on its row's path; `path` and `counts` as of `paths_of`."""
    flags = np.zeros(len(trees.tokens), np.bool_)
    row, step = np.nonzero((np.arange(path.shape[1]) < counts[:, None]) & (path > 0))
    flags[trees.offsets[row] + path[row, step] - 1] = True
    return flags


def moves(feed: Feed, path: Index, counts: Index) -> tuple[Index, Index]:
    """Return sources and targets of KV of accepted nodes that is not where a row's text continues.

    Both are `[M]` indices of fed tokens; `path` and `counts` are as of `paths_of`. All sources must
    be read before a target is written: targets are sources of other paths.
    """
    row, step = np.nonzero(np.arange(path.shape[1]) < counts[:, None])
    place = path[row, step]
    start = (np.cumsum(feed.counts) - feed.counts)[row]
    apart = place != step
    return (start + place)[apart], (start + step)[apart]


def hidden_places(trees: TokenTrees, feed: Feed) -> tuple[Index, Index]:
    """Return `[M]` fed queries and keys on different paths, which a causal mask would not hide."""
    row, query, key = trees.hidden()
    start = np.cumsum(feed.counts) - feed.counts
    return start[row] + query, start[row] + key


def full_mask(trees: TokenTrees, feed: Feed, contexts: Index, device: torch.device) -> torch.Tensor:
    """Return the mask that SGLang's kernels take: for each row `[places, context + places]`, flat.

    It is made on its device; only what is hidden among the drafted places comes from the host.
    `feed` is uniform; `contexts` `[n]` are tokens of each row before its last one.
    """
    width = feed.width
    line = contexts + width
    begin = np.cumsum(width * line) - width * line
    mask = torch.ones(int((width * line).sum()), dtype=torch.bool, device=device)
    if width > 1:
        later_query, later_key = np.triu_indices(width, 1)
        later = (begin + contexts)[:, None] + line[:, None] * later_query + later_key
        query, key = hidden_places(trees, feed)
        row = feed.row[query]
        apart = begin[row] + line[row] * feed.place[query] + contexts[row] + feed.place[key]
        hidden = np.concatenate([later.ravel(), apart])
        mask[torch.from_numpy(hidden).to(device)] = False
    return mask


def walk_on_device(
    draws: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do `rollout.acceptance.accept_tree` in tensor operations, without waiting for the device.

    `[n, W]` are `draws`, the token drawn after each place; `tokens` fed there, the row's last one
    at place 0; and `parents`, their places, -1 if there is no node (place 0, padding). `depth` is
    that of the deepest tree. Returns `path` `[n, depth + 1]` and int64 `counts` `[n]` as of
    `paths_of`.
    """
    at = torch.zeros(len(draws), dtype=torch.int64, device=draws.device)
    going = torch.ones(len(draws), dtype=torch.bool, device=draws.device)
    path, counts = [at], torch.ones_like(at)
    for _ in range(depth):
        drawn = draws.gather(1, at[:, None])
        child = (parents == at[:, None]) & (tokens == drawn)
        going = going & child.any(dim=1)
        at = torch.where(going, child.int().argmax(dim=1), at)
        counts = counts + going
        path.append(at)
    return torch.stack(path, 1), counts
