"""The draws of one step, and the verification of kept tokens inside it.

One token is drawn for each position whose logits are wanted. The context of a request with kept
tokens goes through the model with them after it: one pass gives the current policy at each of them
and the KV of all. The KV of accepted tokens (`asyncrl.engine.sampling.verification`) stays in the
slot; decoding continues after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.drafting.trees import TokenTrees
from asyncrl.engine.errors import EngineError
from asyncrl.engine.protocol import turn_start
from asyncrl.engine.sampling.drawing import Drawn, Streams, noise_seeds
from asyncrl.engine.sampling.logits import Distributions, distributions_of
from asyncrl.engine.sampling.verification import KeptBatch, judge
from asyncrl.engine.torch.rows import NewRows, Rows
from asyncrl.engine.torch.step_kernels import place_draws
from asyncrl.rollout.trajectory import FloatArray, IntArray, SeedArray

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Draws:
    """All draws of a step, flat: N of them, row by row, one for each position with logits."""

    row: NDArray[np.int64]
    starts: NDArray[np.int64]
    distributions: Distributions
    """The processed distribution of each draw, N rows."""
    tokens: NDArray[np.int64]
    """`[N]` the draw at each position. In a row with kept tokens: the accepted ones, the token
    drawn after them, then -1."""
    logprobs: FloatArray
    """`[N]` the log-probabilities of `tokens`; arbitrary for token -1."""
    ids: IntArray
    """`[N, K]` the list at each position; in a row with kept tokens, that of the kept token."""
    values: FloatArray
    """`[N, K]` the log-probabilities of `ids`."""
    noise_seeds: SeedArray
    """`[N]` seeds of the noise for tokens outside the list."""
    judged: NDArray[np.int64]
    """Rows that came with kept tokens, which `judge_rows` accepts or rejects."""
    accepted: IntArray
    """`[n]` accepted kept tokens; 0 for all other rows."""
    begun: IntArray
    """`[n]` accepted kept tokens of earlier turns, whose stops do not count."""


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

    `logits` `[sum(trees.counts) + sum(new.wanted), V]` may be overwritten. Raises EngineError if a
    distribution is not finite.
    """
    decoding = trees.rows
    sizes = trees.counts
    if len(new.wanted):
        sizes = np.concatenate([sizes, new.wanted])
    if new.followers:
        ends = np.cumsum(sizes)[decoding:] - 1
        shared = [ends[leader] for _, leader in new.followers]
        index = np.concatenate([np.arange(logits.shape[0]), shared])
        logits = logits[torch.from_numpy(index).to(logits.device)]
        sizes = np.concatenate([sizes, np.ones(len(shared), np.int32)])
    n = rows.n
    # Nodes of equal depth share a position and its random number: at most one of them is used.
    depths = trees.fed(np.zeros(decoding, np.int32), trees.depths) if trees.forked else _NONE
    responses = rows.total[:n] - rows.prompt[:n]
    places = place_draws(sizes, depths, responses, rows.seed, rows.noise_seed)
    row, size = places.row, len(places.row)
    distributions = distributions_of(logits, rows.sampling.at(row), k, max_bytes)
    judged = [r for r, wanted in zip(new.leaders, new.wanted, strict=True) if wanted > 1]
    streams = Streams(places.seeds, places.positions, places.noise_seeds)
    if not judged:
        drawn = distributions.draw(k, streams)
        tokens, logprobs, ids, values = arrays_of(drawn)
        own = None
    else:
        own = np.flatnonzero(~np.isin(row, judged))
        tokens, logprobs = np.full(size, -1, np.int64), np.empty(size, np.float32)
        ids, values = np.empty((size, k), np.int32), np.empty((size, k), np.float32)
        tokens[own], logprobs[own], ids[own], values[own] = arrays_of(
            distributions.draw(k, streams.part(own), own)
        )
    undrawn = tokens < 0 if own is None else own[tokens[own] < 0]
    if undrawn.any() if own is None else len(undrawn):
        names = [rows.requests[r].request_id for r in row[undrawn]]
        raise EngineError(not_finite(names, policy_version))
    return Draws(
        row=row,
        starts=places.starts,
        distributions=distributions,
        tokens=tokens,
        logprobs=logprobs,
        ids=ids,
        values=values,
        noise_seeds=places.noise_seeds,
        judged=np.array(judged, np.int64),
        accepted=np.zeros(n, np.int32),
        begun=np.zeros(n, np.int32),
    )


def arrays_of(drawn: Drawn) -> tuple[NDArray[np.int64], FloatArray, IntArray, FloatArray]:
    """Return tokens `[N]`, their log-probabilities, and the lists' ids and values `[N, K]`."""
    tokens, (ids, values), logprobs = drawn
    return (
        tokens.cpu().numpy(),
        np.ascontiguousarray(logprobs.cpu().numpy()),
        np.ascontiguousarray(ids.cpu().numpy()),
        np.ascontiguousarray(values.cpu().numpy()),
    )


def not_finite(names: Sequence[str], policy_version: int) -> str:
    """Return the error message for distributions that are not finite."""
    return (
        f"the model's probabilities are not finite for requests {sorted(set(names))[:5]} under "
        f"policy version {policy_version}: its weights or activations overflowed"
    )


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
        draws.begun[row] = begun = turn_start(one.observed, int(accepted))
        if begun:
            place = int(rows.total[row] - rows.prompt[row]) + begun
            rows.limit[row] = rows.prompt[row] + rows.requests[row].sampling.last_token(place)


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
