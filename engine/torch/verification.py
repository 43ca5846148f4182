"""Verification of kept tokens, inside the step that takes their request in.

The context goes through the model with the kept tokens after it: one pass gives the current policy
at each of them and the KV of all. The KV of accepted tokens
(`asyncrl.engine.sampling.verification`) stays in the slot; decoding continues after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import turn_start
from asyncrl.engine.sampling.drawing import Streams, noise_seeds
from asyncrl.engine.sampling.logits import Distributions
from asyncrl.engine.sampling.verification import KeptBatch, judge
from asyncrl.engine.torch.rows import Rows
from asyncrl.engine.torch.step_sampling import Draws, arrays_of, not_finite
from asyncrl.rollout.trajectory import FloatArray, IntArray, SeedArray


@dataclass(frozen=True, slots=True)
class KeptVerdicts:
    """The outcome of the kept tokens of B rows, N in all."""

    accepted: IntArray
    """`[B]` kept tokens that stay."""
    token: NDArray[np.int64]
    """`[B]` the token after them."""
    logprobs: FloatArray
    """`[N + B]` the current log-probability of each kept token; in the place of the first one that
    does not stay, that of `token`."""
    ids: IntArray
    """`[N + B, K]` row after row, the list at each kept token, and after the last one."""
    values: FloatArray
    """`[N + B, K]` the current log-probabilities of `ids`."""
    noise_seeds: SeedArray
    """`[N + B]`"""


def judge_rows(rows: Rows, draws: Draws, policy_version: int) -> None:
    """Verify the kept tokens of `draws.judged`; fill in their draws. Raises EngineError."""
    judged, k = draws.judged, draws.ids.shape[1]
    requests = [rows.requests[row] for row in judged]
    kept = [request.kept for request in requests if request.kept is not None]
    first = (rows.total - rows.prompt)[judged].astype(np.int64)
    batch = KeptBatch.of(kept, rows.seed[judged], first, k)
    names = [request.request_id for request in requests]
    mine = np.flatnonzero(np.isin(draws.row, judged))
    verdicts = judge_kept(batch, names, draws.distributions, mine, policy_version)
    draws.logprobs[mine] = verdicts.logprobs
    draws.ids[mine], draws.values[mine] = verdicts.ids, verdicts.values
    draws.noise_seeds[mine] = verdicts.noise_seeds
    for row, one, accepted, token in zip(
        judged, kept, verdicts.accepted, verdicts.token, strict=True
    ):
        start = draws.starts[row]
        draws.tokens[start : start + accepted] = one.tokens[:accepted]
        draws.tokens[start + accepted] = token
        draws.accepted[row] = accepted
        draws.begun[row] = turn_start(one.observed, int(accepted))


def judge_kept(
    batch: KeptBatch,
    names: Sequence[str],
    distributions: Distributions,
    mine: NDArray[np.int64],
    policy_version: int,
) -> KeptVerdicts:
    """Accept a prefix of each row and draw the token after it.

    `names` `[B]` are for error messages. `mine` `[N + B]` are rows of the current distributions at
    the batch's kept tokens and after each row's last one, in order. Raises EngineError if a
    distribution is not finite.
    """
    columns, rows = batch.columns, np.arange(len(batch.kept))
    place = np.arange(len(batch.row)) + batch.row
    reading = distributions.read(mine[place], columns)
    wrong = reading.not_finite()
    if wrong.any():
        _refuse(names, np.unique(batch.row[wrong]), policy_version)
    verdict = judge(batch, reading, policy_version)
    after = verdict.place(batch, rows) + rows
    unnamed = np.flatnonzero(verdict.unnamed)
    if len(unnamed):
        distributions.name_tokens(batch, verdict, unnamed, mine[after[unnamed]])
    k = columns.ids.shape[1]
    ids = np.full((len(mine), k), -1, np.int32)
    values = np.full(ids.shape, -np.inf, np.float32)
    noise, logprobs = np.empty(len(mine), np.uint64), np.empty(len(mine), np.float32)
    ids[place], values[place], noise[place] = columns.ids, reading.listed, columns.noise_seeds
    logprobs[place] = reading.own
    noise[after], logprobs[after] = verdict.noise_seed, verdict.logprob
    fresh = noise_seeds(batch.seeds, policy_version)
    if not columns.exact.all():
        lenient = np.flatnonzero(~columns.exact)
        part = place[lenient]
        listed = distributions.top_k(k, mine[part])
        ids[part], values[part] = listed.ids.cpu().numpy(), listed.logprobs.cpu().numpy()
        noise[part] = fresh[batch.row[lenient]]
    free = np.flatnonzero(verdict.token < 0)
    if len(free):
        at = after[free]
        position = batch.first[free] + verdict.accepted[free]
        streams = Streams(batch.seeds[free], position, fresh[free])
        drawn = distributions.draw(k, streams, mine[at])
        verdict.token[free], logprobs[at], ids[at], values[at] = arrays_of(drawn)
        noise[at] = fresh[free]
    if (verdict.token < 0).any():
        _refuse(names, np.flatnonzero(verdict.token < 0), policy_version)
    return KeptVerdicts(verdict.accepted, verdict.token, logprobs, ids, values, noise)


def _refuse(names: Sequence[str], rows: NDArray[np.int64], policy_version: int) -> None:
    raise EngineError(not_finite([names[row] for row in rows], policy_version))
