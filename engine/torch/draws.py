"""The draws of one step: one token for each position whose logits are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.drawing import Streams, draw
from engine.errors import EngineError
from engine.logits import process_all
from engine.torch.rows import NewRows, Rows
from engine.torch.trees import TokenTrees
from rollout.trajectory import FloatArray, IntArray, SeedArray


@dataclass(frozen=True, slots=True)
class Draws:
    """All draws of a step, flat: N of them, row by row, one for each position with logits."""

    row: NDArray[np.int64]
    """`[N]` row of each draw."""
    starts: NDArray[np.int64]
    """`[n]` each row's first draw."""
    logprobs: torch.Tensor
    """`[N, V]` the processed distribution of each draw."""
    tokens: NDArray[np.int64]
    """`[N]` the draw at each position. In a row with kept tokens: the accepted ones, the token
    drawn after them, then -1."""
    ids: IntArray
    """`[N, K]` the list at each position; in a row with kept tokens, that of the kept token."""
    values: FloatArray
    """`[N, K]` the log-probabilities of `ids`."""
    noise_seeds: SeedArray
    """`[N]` of the noise for tokens outside the list."""
    judged: NDArray[np.int64]
    """Rows that came with kept tokens, which `verification.judge_rows` accepts or rejects."""
    accepted: IntArray
    """`[n]` accepted kept tokens; 0 for all other rows."""


def draw_step(
    rows: Rows,
    trees: TokenTrees,
    new: NewRows,
    logits: torch.Tensor,
    *,
    k: int,
    max_bytes: int,
    policy_version: int,
) -> Draws:
    """Draw a token after every token that was fed, except in rows with kept tokens.

    Args:
        rows: as they were fed.
        trees: what decoding rows were fed besides their last token.
        new: rows whose contexts were fed.
        logits: `[sum(trees.counts) + sum(new.wanted), V]`; may be overwritten.
        k: tokens listed at each position.
        max_bytes: memory that may be held at once to process distributions.
        policy_version: of the weights.

    Raises:
        EngineError: a distribution is not finite.
    """
    decoding = trees.rows
    sizes = np.concatenate([trees.counts, new.wanted])
    if new.followers:
        ends = np.cumsum(sizes)[decoding:] - 1
        shared = [ends[leader] for _, leader in new.followers]
        index = np.concatenate([np.arange(logits.shape[0]), shared])
        logits = logits[torch.from_numpy(index).to(logits.device)]
        sizes = np.concatenate([sizes, np.ones(len(shared), np.int32)])
    row = np.repeat(np.arange(rows.n), sizes)
    starts = np.cumsum(sizes) - sizes
    offset = np.arange(len(row)) - starts[row]
    if trees.forked:
        # Nodes of equal depth share a position and its random number: at most one of them is used.
        nodes = trees.fed(np.zeros(decoding, np.int32), trees.depths)
        offset[: len(nodes)] = nodes
    logprobs = process_all(logits, rows.sampling.at(row), max_bytes)
    judged = [r for r, wanted in zip(new.leaders, new.wanted, strict=True) if wanted > 1]
    noise = rows.noise_seed[row]
    position = (rows.total - rows.prompt)[row] + offset
    if not judged:
        tokens, ids, values = _draw(logprobs, k, Streams(rows.seed[row], position, noise), None)
        own = np.arange(len(row))
    else:
        own = np.flatnonzero(~np.isin(row, judged))
        tokens = np.full(len(row), -1, np.int64)
        ids, values = np.empty((len(row), k), np.int32), np.empty((len(row), k), np.float32)
        streams = Streams(rows.seed[row[own]], position[own], noise[own])
        tokens[own], ids[own], values[own] = _draw(logprobs, k, streams, own)
    if (tokens[own] < 0).any():
        names = [rows.requests[r].request_id for r in row[own][tokens[own] < 0]]
        raise EngineError(not_finite(names, policy_version))
    return Draws(
        row=row,
        starts=starts,
        logprobs=logprobs,
        tokens=tokens,
        ids=ids,
        values=values,
        noise_seeds=noise,
        judged=np.array(judged, np.int64),
        accepted=np.zeros(rows.n, np.int32),
    )


def _draw(
    logprobs: torch.Tensor, k: int, streams: Streams, rows: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], IntArray, FloatArray]:
    drawn = draw(logprobs, k, streams, rows)
    ids, values = drawn.listed
    return drawn.tokens.cpu().numpy(), ids.cpu().numpy(), values.cpu().numpy()


def not_finite(names: Sequence[str], policy_version: int) -> str:
    """The error message for distributions that are not finite."""
    return (
        f"the model's probabilities are not finite for requests {sorted(set(names))[:5]} under "
        f"policy version {policy_version}: its weights or activations overflowed"
    )
