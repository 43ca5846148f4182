"""Kept tokens judged inside the step that takes their request in.

The request's context goes through the model with the kept tokens behind it, so that one pass gives
the current policy at each of them and the KV of all. What is accepted stays in the slot; decoding
goes on behind it.

The whole current distribution is at hand here, so the set on which a kept token can be accepted is
all of the old policy's stored top-K: its tokens are listed with their current probability, and what
lies outside is drawn with just those excluded. That set does not depend on the token that stands
there, as `rollout.acceptance.verify_kept` demands.

Numbers: a function of (seed of the request, policy version, position), from streams beside the one
that draws. `lenient` tokens and what follows a fully accepted text are drawn from the request's own
stream, which the protocol demands to be new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.errors import EngineError
from engine.sampling import Purpose, draw, draw_outside, forked, uniforms
from engine.torch.draws import Draws, not_finite
from engine.torch.rows import Rows
from rollout.acceptance import TopKDistributions, accept_lenient, verify_kept
from rollout.trajectory import FloatArray, IntArray, KeptTokens


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """B rows whose kept tokens a step judges. N kept tokens in all."""

    kept: Sequence[KeptTokens]
    names: Sequence[str]
    """Request ids, for error messages."""
    seeds: NDArray[np.uint64]
    """`[B]` of the requests."""
    positions: NDArray[np.int64]
    """`[B]` place in the response of each row's first kept token."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What becomes of each row."""

    accepted: IntArray
    """`[B]` kept tokens that stay."""
    token: IntArray
    """`[B]` drawn behind them."""


def judge_rows(rows: Rows, draws: Draws, policy_version: int) -> None:
    """Verify the kept tokens of `draws.judged`; fills in their tokens and how many stay.

    Raises:
        EngineError: a distribution is not finite.
    """
    judged = draws.judged
    requests = [rows.requests[row] for row in judged]
    kept = [request.kept for request in requests if request.kept is not None]
    batch = KeptBatch(
        kept,
        [request.request_id for request in requests],
        rows.seed[judged],
        (rows.total - rows.prompt)[judged].astype(np.int64),
    )
    mine = np.flatnonzero(np.isin(draws.row, judged))
    whole = len(mine) == len(draws.row)
    logprobs = draws.logprobs if whole else _rows(draws.logprobs, mine)
    result = judge_kept(batch, logprobs, policy_version)
    for row, old, stays, token in zip(judged, kept, result.accepted, result.token, strict=True):
        start = draws.starts[row]
        draws.tokens[start : start + stays] = old.tokens[:stays]
        draws.tokens[start + stays] = token
        draws.accepted[row] = stays


def judge_kept(batch: KeptBatch, logprobs: torch.Tensor, policy_version: int) -> Judged:
    """Accept a prefix of each row and draw the token behind it.

    Args:
        batch: at least one row.
        logprobs: `[N + B, V]` the processed current distribution, row after row: at each kept token
            and behind the last one.
        policy_version: of the current weights.

    Raises:
        EngineError: a distribution is not finite.
    """
    lengths = np.array([len(kept) for kept in batch.kept], np.int64)
    rows = np.arange(len(lengths))
    row = np.repeat(rows, lengths)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    place = np.arange(len(row)) + row  # of each kept token in `logprobs`
    position = np.arange(len(row)) - offsets[row] + batch.positions[row]
    tokens = np.concatenate([kept.tokens for kept in batch.kept]).astype(np.int32)
    drawn = TopKDistributions.concatenate(batch.kept)
    now = _now(logprobs, place, tokens, drawn.topk_ids)
    wrong = np.isnan(now.logprobs) | np.isnan(now.topk_logprobs).any(axis=1)
    if wrong.any():
        raise EngineError(_not_finite(batch, np.unique(row[wrong]), policy_version))
    accepts = uniforms(forked(batch.seeds, Purpose.ACCEPT, policy_version)[row], position)
    residual = uniforms(forked(batch.seeds, Purpose.RESIDUAL, policy_version)[row], position)
    outside = logprobs.shape[1]
    accepted, token = np.zeros(len(rows), np.int32), np.full(len(rows), -1, np.int32)
    for lenience in {kept.lenience for kept in batch.kept}:
        chosen = np.array([kept.lenience == lenience for kept in batch.kept])
        part = chosen[row]
        starts = np.zeros(int(chosen.sum()) + 1, np.int32)
        np.cumsum(lengths[chosen], out=starts[1:])
        if lenience is not None:
            accepted[chosen] = accept_lenient(
                drawn.logprobs[part], now.logprobs[part], starts, accepts[part], lenience
            )
            continue
        listed = _part(now, part)
        # One id that no list holds stands for all that is outside; only where it is chosen is a
        # token drawn there. The mass is right to rounding, about 1e-7.
        mass = 1 - np.exp(listed.topk_logprobs, dtype=np.float64).sum(axis=1)
        verdicts = verify_kept(
            tokens[part],
            _part(drawn, part),
            listed,
            tail_ids=np.where(mass > 0, outside, -1),
            tail_logprobs=np.full(len(mass), -np.inf),
            offsets=starts,
            uniforms=np.stack([accepts[part], residual[part]], axis=1),
        )
        accepted[chosen], token[chosen] = verdicts.accepted, verdicts.token
    at = offsets[:-1] + accepted
    tail = np.flatnonzero(token == outside)
    if len(tail):
        numbers = uniforms(
            forked(batch.seeds[tail], Purpose.TAIL, policy_version), position[at[tail]]
        )
        token[tail], _ = draw_outside(
            _rows(logprobs, place[at[tail]]), drawn.topk_ids[at[tail]], numbers
        )
    # Also where nothing was outside after all: a residual of nothing but rounding, about 1e-7.
    free = np.flatnonzero(token < 0)
    if len(free):
        numbers = uniforms(batch.seeds[free], batch.positions[free] + accepted[free])
        token[free] = draw(_rows(logprobs, at[free] + free), numbers).cpu().numpy()
    if (token < 0).any():
        raise EngineError(_not_finite(batch, np.flatnonzero(token < 0), policy_version))
    return Judged(accepted, token)


def _now(
    logprobs: torch.Tensor, place: NDArray[np.int64], tokens: IntArray, ids: IntArray
) -> TopKDistributions:
    """The current policy at the kept tokens and at the ids listed beside them."""
    columns = np.concatenate([tokens[:, None], ids], axis=1).astype(np.int64).clip(min=0)
    where = torch.from_numpy(np.stack([np.broadcast_to(place[:, None], columns.shape), columns]))
    row, column = where.to(logprobs.device)
    values: FloatArray = logprobs[row, column].float().cpu().numpy()
    listed = np.where(ids >= 0, values[:, 1:], np.float32(-np.inf))
    return TopKDistributions(values[:, 0], ids, listed)


def _part(known: TopKDistributions, part: NDArray[np.bool_]) -> TopKDistributions:
    return TopKDistributions(known.logprobs[part], known.topk_ids[part], known.topk_logprobs[part])


def _rows(logprobs: torch.Tensor, index: NDArray[np.integer]) -> torch.Tensor:
    return logprobs[torch.from_numpy(index.astype(np.int64)).to(logprobs.device)]


def _not_finite(batch: KeptBatch, rows: NDArray[np.int64], policy_version: int) -> str:
    return not_finite([batch.names[row] for row in rows], policy_version)
