"""Verification of kept tokens, inside the step that takes their request in.

The request's context goes through the model with the kept tokens after it, so that one pass gives
the current policy at each of them and the KV of all. What is accepted (`engine.verification`) stays
in the slot; decoding continues after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.drawing import Streams, TopK, draw, noise_seeds, top_k
from engine.errors import EngineError
from engine.torch.draws import Draws, not_finite
from engine.torch.rows import Rows
from engine.verification import KeptBatch, judge, name_tokens, read
from rollout.trajectory import FloatArray, IntArray, SeedArray


@dataclass(frozen=True, slots=True)
class KeptVerdicts:
    """What becomes of the kept tokens of B rows, N in all."""

    accepted: IntArray
    """`[B]` kept tokens that stay."""
    token: NDArray[np.int64]
    """`[B]` the token after them."""
    ids: IntArray
    """`[N + B, K]` row after row, the list at each kept token, and after the last one."""
    values: FloatArray
    """`[N + B, K]` the current log-probabilities of `ids`."""
    noise_seeds: SeedArray
    """`[N + B]`"""


def judge_rows(rows: Rows, draws: Draws, policy_version: int) -> None:
    """Verify the kept tokens of `draws.judged`; fills in what is known of their draws.

    Raises:
        EngineError: a distribution is not finite.
    """
    judged, k = draws.judged, draws.ids.shape[1]
    requests = [rows.requests[row] for row in judged]
    kept = [request.kept for request in requests if request.kept is not None]
    first = (rows.total - rows.prompt)[judged].astype(np.int64)
    batch = KeptBatch.of(kept, rows.seed[judged], first, k)
    names = [request.request_id for request in requests]
    mine = np.flatnonzero(np.isin(draws.row, judged))
    verdicts = judge_kept(batch, names, draws.logprobs, mine, policy_version)
    draws.ids[mine], draws.values[mine] = verdicts.ids, verdicts.values
    draws.noise_seeds[mine] = verdicts.noise_seeds
    for row, one, accepted, token in zip(
        judged, kept, verdicts.accepted, verdicts.token, strict=True
    ):
        start = draws.starts[row]
        draws.tokens[start : start + accepted] = one.tokens[:accepted]
        draws.tokens[start + accepted] = token
        draws.accepted[row] = accepted


def judge_kept(
    batch: KeptBatch,
    names: Sequence[str],
    logprobs: torch.Tensor,
    mine: NDArray[np.int64],
    policy_version: int,
) -> KeptVerdicts:
    """Accept a prefix of each row and draw the token after it.

    Args:
        batch: at least one row.
        names: `[B]` of the requests, for error messages.
        logprobs: `[R, V]` processed current distributions.
        mine: `[N + B]` rows of `logprobs` at the batch's kept tokens and after each row's last one,
            in order.
        policy_version: of the current weights.

    Raises:
        EngineError: a distribution is not finite.
    """
    columns, rows = batch.columns, np.arange(len(batch.kept))
    place = np.arange(len(batch.row)) + batch.row
    reading = read(logprobs, mine[place], columns)
    wrong = reading.not_finite()
    if wrong.any():
        _refuse(names, np.unique(batch.row[wrong]), policy_version)
    verdict = judge(batch, reading, policy_version)
    after = verdict.place(batch, rows) + rows
    unnamed = np.flatnonzero(verdict.unnamed)
    name_tokens(batch, verdict, unnamed, logprobs, mine[after[unnamed]])
    k = columns.ids.shape[1]
    ids = np.full((len(mine), k), -1, np.int32)
    values = np.full(ids.shape, -np.inf, np.float32)
    noise = np.empty(len(mine), np.uint64)
    ids[place], values[place], noise[place] = columns.ids, reading.listed, columns.noise_seeds
    noise[after] = verdict.noise_seed
    fresh = noise_seeds(batch.seeds, policy_version)
    if not columns.exact.all():
        lenient = np.flatnonzero(~columns.exact)
        part = place[lenient]
        ids[part], values[part] = _lists(top_k(logprobs, k, mine[part]))
        noise[part] = fresh[batch.row[lenient]]
    free = np.flatnonzero(verdict.token < 0)
    if len(free):
        at = after[free]
        position = batch.first[free] + verdict.accepted[free]
        drawn = draw(logprobs, k, Streams(batch.seeds[free], position, fresh[free]), mine[at])
        verdict.token[free] = drawn.tokens.cpu().numpy()
        ids[at], values[at] = _lists(drawn.listed)
        noise[at] = fresh[free]
    if (verdict.token < 0).any():
        _refuse(names, np.flatnonzero(verdict.token < 0), policy_version)
    return KeptVerdicts(verdict.accepted, verdict.token, ids, values, noise)


def _lists(listed: TopK) -> tuple[IntArray, FloatArray]:
    return listed.ids.cpu().numpy(), listed.logprobs.cpu().numpy()


def _refuse(names: Sequence[str], rows: NDArray[np.int64], policy_version: int) -> None:
    raise EngineError(not_finite([names[row] for row in rows], policy_version))
