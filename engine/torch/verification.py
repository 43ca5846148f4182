"""Verification of kept tokens, inside the step that takes their request in.

The request's context goes through the model with the kept tokens after it, so that one pass gives
the current policy at each of them and the KV of all. What is accepted stays in the slot; decoding
continues after it.

The whole current distribution is at hand here, so the set on which a kept token can be accepted is
all of the old policy's stored top-K: its tokens are listed with their current probability, and what
lies outside is drawn with just those excluded. That set does not depend on the token that stands
there, as `rollout.acceptance.verify_kept` demands.

Random numbers are a function of (seed of the request, policy version, position), from streams of
their own. `lenient` tokens and what follows a fully accepted text are drawn from the request's own
stream, which the protocol demands to be new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.drafting.proposals import offsets_of
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
    first: NDArray[np.int64]
    """`[B]` position in the response of each row's first kept token."""
    row: NDArray[np.int64]
    """`[N]` index of each kept token's row, 0 to B - 1."""
    offsets: IntArray
    """`[B + 1]` row i has the kept tokens offsets[i] .. offsets[i + 1] - 1."""
    position: NDArray[np.int64]
    """`[N]` position of each kept token in its response."""
    place: NDArray[np.int64]
    """`[N]` of each kept token among the N + B distributions: row after row, one at each kept token
    and one after the last."""

    @classmethod
    def of(cls, rows: Rows, judged: NDArray[np.int64]) -> KeptBatch:
        """The kept tokens of some rows, all of which have some."""
        requests = [rows.requests[row] for row in judged]
        kept = [request.kept for request in requests if request.kept is not None]
        lengths = np.array([len(one) for one in kept], np.int64)
        first = (rows.total - rows.prompt)[judged].astype(np.int64)
        row = np.repeat(np.arange(len(kept)), lengths)
        offsets = offsets_of(lengths)
        index = np.arange(len(row))
        return cls(
            kept=kept,
            names=[request.request_id for request in requests],
            seeds=rows.seed[judged],
            first=first,
            row=row,
            offsets=offsets,
            position=index - offsets[row] + first[row],
            place=index + row,
        )

    def uniforms(self, purpose: Purpose, policy_version: int) -> NDArray[np.float64]:
        """`[N]` numbers in (0, 1), one for each kept token."""
        return uniforms(forked(self.seeds, purpose, policy_version)[self.row], self.position)


@dataclass(frozen=True, slots=True)
class KeptVerdicts:
    """What becomes of each row's kept tokens."""

    accepted: IntArray
    """`[B]` kept tokens that stay."""
    token: IntArray
    """`[B]` the token drawn after them."""


def judge_rows(rows: Rows, draws: Draws, policy_version: int) -> None:
    """Verify the kept tokens of `draws.judged`; fills in their tokens and how many stay.

    Raises:
        EngineError: a distribution is not finite.
    """
    batch = KeptBatch.of(rows, draws.judged)
    mine = np.flatnonzero(np.isin(draws.row, draws.judged))
    whole = len(mine) == len(draws.row)
    logprobs = draws.logprobs if whole else _select(draws.logprobs, mine)
    verdicts = judge_kept(batch, logprobs, policy_version)
    for row, kept, accepted, token in zip(
        draws.judged, batch.kept, verdicts.accepted, verdicts.token, strict=True
    ):
        start = draws.starts[row]
        draws.tokens[start : start + accepted] = kept.tokens[:accepted]
        draws.tokens[start + accepted] = token
        draws.accepted[row] = accepted


def judge_kept(batch: KeptBatch, logprobs: torch.Tensor, policy_version: int) -> KeptVerdicts:
    """Accept a prefix of each row and draw the token after it.

    Args:
        batch: at least one row.
        logprobs: `[N + B, V]` the processed current distributions, see `KeptBatch.place`.
        policy_version: of the current weights.

    Raises:
        EngineError: a distribution is not finite.
    """
    old = TopKDistributions.concatenate(batch.kept)
    tokens = np.concatenate([kept.tokens for kept in batch.kept]).astype(np.int32)
    current = _at(logprobs, batch.place, tokens, old.topk_ids)
    wrong = np.isnan(current.logprobs) | np.isnan(current.topk_logprobs).any(axis=1)
    if wrong.any():
        raise EngineError(_not_finite(batch, np.unique(batch.row[wrong]), policy_version))
    outside = logprobs.shape[1]
    accepted, token = _accept(batch, tokens, old, current, outside, policy_version)
    at = batch.offsets[:-1] + accepted
    tail = np.flatnonzero(token == outside)
    if len(tail):
        numbers = uniforms(
            forked(batch.seeds[tail], Purpose.TAIL, policy_version), batch.position[at[tail]]
        )
        distributions = _select(logprobs, batch.place[at[tail]])
        token[tail], _ = draw_outside(distributions, old.topk_ids[at[tail]], numbers)
    # Also where nothing was outside after all: a residual of nothing but rounding, about 1e-7.
    free = np.flatnonzero(token < 0)
    if len(free):
        numbers = uniforms(batch.seeds[free], batch.first[free] + accepted[free])
        token[free] = draw(_select(logprobs, at[free] + free), numbers).cpu().numpy()
    if (token < 0).any():
        raise EngineError(_not_finite(batch, np.flatnonzero(token < 0), policy_version))
    return KeptVerdicts(accepted, token)


def _accept(
    batch: KeptBatch,
    tokens: IntArray,
    old: TopKDistributions,
    current: TopKDistributions,
    outside: int,
    policy_version: int,
) -> tuple[IntArray, IntArray]:
    """Apply each row's rule of acceptance.

    Args:
        batch: of the tokens.
        tokens: `[N]` kept tokens.
        old: distributions that drew them.
        current: distributions of the current policy, at the same ids.
        outside: an id that no list holds; it stands for all that is outside the lists.
        policy_version: of the current weights.

    Returns:
        `[B]` accepted tokens, and `[B]` the token drawn in the place of the first rejected one:
        `outside`, or -1 where the current policy draws freely.
    """
    accepts = batch.uniforms(Purpose.ACCEPT, policy_version)
    residual = batch.uniforms(Purpose.RESIDUAL, policy_version)
    lengths = np.diff(batch.offsets)
    accepted = np.zeros(len(lengths), np.int32)
    token = np.full(len(lengths), -1, np.int32)
    for lenience in {kept.lenience for kept in batch.kept}:
        chosen = np.array([kept.lenience == lenience for kept in batch.kept])
        part = chosen[batch.row]
        offsets = offsets_of(lengths[chosen])
        if lenience is not None:
            accepted[chosen] = accept_lenient(
                old.logprobs[part], current.logprobs[part], offsets, accepts[part], lenience
            )
            continue
        listed = _part(current, part)
        # The token outside is only drawn where it is chosen. Its mass is right to rounding, 1e-7.
        mass = 1 - np.exp(listed.topk_logprobs, dtype=np.float64).sum(axis=1)
        verdicts = verify_kept(
            tokens[part],
            _part(old, part),
            listed,
            tail_ids=np.where(mass > 0, outside, -1),
            tail_logprobs=np.full(len(mass), -np.inf),
            offsets=offsets,
            uniforms=np.stack([accepts[part], residual[part]], axis=1),
        )
        accepted[chosen], token[chosen] = verdicts.accepted, verdicts.token
    return accepted, token


def _at(
    logprobs: torch.Tensor, place: NDArray[np.int64], tokens: IntArray, ids: IntArray
) -> TopKDistributions:
    """The distributions at `place`, at the tokens and at the ids listed with them."""
    columns = np.concatenate([tokens[:, None], ids], axis=1).astype(np.int64).clip(min=0)
    where = torch.from_numpy(np.stack([np.broadcast_to(place[:, None], columns.shape), columns]))
    row, column = where.to(logprobs.device)
    values: FloatArray = logprobs[row, column].float().cpu().numpy()
    listed = np.where(ids >= 0, values[:, 1:], np.float32(-np.inf))
    return TopKDistributions(values[:, 0], ids, listed)


def _part(all_: TopKDistributions, part: NDArray[np.bool_]) -> TopKDistributions:
    return TopKDistributions(all_.logprobs[part], all_.topk_ids[part], all_.topk_logprobs[part])


def _select(logprobs: torch.Tensor, index: NDArray[np.integer]) -> torch.Tensor:
    return logprobs[torch.from_numpy(index.astype(np.int64)).to(logprobs.device)]


def _not_finite(batch: KeptBatch, rows: NDArray[np.int64], policy_version: int) -> str:
    return not_finite([batch.names[row] for row in rows], policy_version)
