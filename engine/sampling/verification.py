"""The verdict on kept tokens, given the current policy at each of them. All engines use it.

An engine runs the kept tokens through its model. `read` of `engine.sampling.logits` looks up what
the rules need in the current distributions, which may come in parts; a token that was drawn outside
its list is named again, by the same noise. `judge` accepts a prefix of each row and draws the
symbol after it. If that is the tail, `name_tokens` draws the token from the distribution at its
position. Both distributions have all mass on an observed token, so a rule always accepts it with
the token before it.

Random numbers are a function of (seed of the request, policy version, position), from separate
streams. What follows a fully accepted row, or `lenient` tokens, is drawn freely by the engine from
the request's own stream, which the protocol demands to be new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.sampling.drawing import noise_seeds
from asyncrl.engine.sampling.truncation import Purpose, forked, uniforms
from asyncrl.rollout.acceptance import accept_lenient, symbols_of, verify_kept
from asyncrl.rollout.contexts import stacked
from asyncrl.rollout.trajectory import FloatArray, IntArray, KeptTokens, SeedArray


class KeptColumns(NamedTuple):
    """N kept tokens with lists of K ids, as `read` needs them."""

    tokens: IntArray
    """`[N]`"""
    ids: IntArray
    """`[N, K]` the list of each, padded with -1."""
    positions: NDArray[np.int64]
    noise_seeds: SeedArray
    """`[N]` seeds of the noise that named tokens outside their lists."""
    exact: NDArray[np.bool_]
    """`[N]` True if the exact rule judges it. If not, its list and its noise are not used."""
    observed: NDArray[np.bool_]
    """`[N]` True if it was observed, as in `KeptTokens`."""

    @classmethod
    def only_tokens(cls, tokens: IntArray, k: int) -> Self:
        """Make columns of tokens that no rule judges: only their log-probabilities are read."""
        n = len(tokens)
        return cls(
            tokens=tokens,
            ids=np.full((n, k), -1, np.int32),
            positions=np.zeros(n, np.int64),
            noise_seeds=np.zeros(n, np.uint64),
            exact=np.zeros(n, np.bool_),
            observed=np.zeros(n, np.bool_),
        )

    def outside(self) -> NDArray[np.bool_]:
        """Return `[N]` whether the exact rule judges a token that was drawn outside its list."""
        in_tail = symbols_of(self.tokens, self.ids) == self.ids.shape[1]
        return np.asarray(self.exact & ~self.observed & in_tail)

    def part(self, part: slice | NDArray[np.int64]) -> KeptColumns:
        """Return some of them; a slice gives views."""
        return KeptColumns._make(one[part] for one in self)

    @classmethod
    def concatenated(cls, parts: Sequence[KeptColumns]) -> KeptColumns:
        """Concatenate; lists are padded to the longest."""
        return cls._make(stacked(column, -1) for column in zip(*parts, strict=True))


class Reading(NamedTuple):
    """The current policy's values at N kept tokens with lists of K ids."""

    own: FloatArray
    """`[N]` log-probability of each token; -inf outside of what is sampled."""
    listed: FloatArray
    """`[N, K]` log-probabilities of the list's ids, -inf for padding."""
    names: NDArray[np.int64]
    """`[N]` the token itself if it is listed. Otherwise the token outside the list that the
    position's noise names now; -1 if none has mass."""
    name_logprobs: FloatArray

    @classmethod
    def empty(cls, n: int, k: int) -> Self:
        """Return arrays to be filled in parts."""
        own, listed, named = (np.full(shape, np.nan, np.float32) for shape in (n, (n, k), n))
        return cls(own, listed, np.full(n, -1, np.int64), named)

    def fill(self, part: slice, other: Reading, source: slice) -> None:
        """Copy a part of another reading, whose lists may be longer, into these arrays."""
        k = self.listed.shape[1]
        self.own[part], self.listed[part] = other.own[source], other.listed[source, :k]
        self.names[part] = other.names[source]
        self.name_logprobs[part] = other.name_logprobs[source]

    @classmethod
    def concatenated(cls, parts: Sequence[Reading]) -> Reading:
        """Concatenate; lists are padded to the longest."""
        return cls._make(stacked(column, -np.inf) for column in zip(*parts, strict=True))

    def given(self, columns: KeptColumns) -> Reading:
        """Put all mass on each observed token, in place."""
        at = np.flatnonzero(columns.observed)
        if len(at):
            tokens, ids = columns.tokens[at], columns.ids[at]
            self.own[at] = self.name_logprobs[at] = 0.0
            self.names[at] = tokens
            self.listed[at] = np.where(ids == tokens[:, None], np.float32(0), np.float32(-np.inf))
        return self

    def not_finite(self) -> NDArray[np.bool_]:
        """Return `[N]` whether the distribution is not finite."""
        return np.asarray(np.isnan(self.own) | np.isnan(self.listed).any(axis=1))


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """The kept tokens of B requests, row after row: N tokens in all, with lists of K ids."""

    kept: Sequence[KeptTokens]
    seeds: SeedArray
    first: NDArray[np.int64]
    """`[B]` position in the response of each row's first kept token."""
    row: NDArray[np.int64]
    """`[N]` index of each kept token's row, 0 to B - 1."""
    offsets: IntArray
    """`[B + 1]` row i has the kept tokens offsets[i] .. offsets[i + 1] - 1."""
    columns: KeptColumns
    """`[N]`; the lists of lenient rows are empty."""
    behaviour: FloatArray
    """`[N, K]` log-probabilities of the lists' ids when the tokens were drawn."""

    @classmethod
    def of(
        cls, kept: Sequence[KeptTokens], seeds: SeedArray, first: NDArray[np.int64], k: int
    ) -> KeptBatch:
        """Collect B rows of kept tokens, none empty, in lists of `k`, at least those in `kept`.

        `seeds` and `first`, the position in the response of a row's first kept token, are `[B]`.
        """
        lengths = np.array([len(one) for one in kept], np.int64)
        row, offsets = np.repeat(np.arange(len(kept)), lengths), offsets_of(lengths)
        ids = np.full((len(row), k), -1, np.int32)
        behaviour = np.full((len(row), k), -np.inf, np.float32)
        exact = np.array([one.lenience is None for one in kept])
        for i in np.flatnonzero(exact).tolist():
            span, width = slice(offsets[i], offsets[i + 1]), kept[i].topk_ids.shape[1]
            ids[span, :width], behaviour[span, :width] = kept[i].topk_ids, kept[i].topk_logprobs
        columns = KeptColumns(
            tokens=np.concatenate([one.tokens for one in kept]).astype(np.int32),
            ids=ids,
            positions=np.arange(len(row)) - offsets[row] + first[row],
            noise_seeds=np.concatenate([one.noise_seeds for one in kept]).astype(np.uint64),
            exact=exact[row],
            observed=np.concatenate([one.observed for one in kept]),
        )
        return cls(kept, seeds, first, row, offsets, columns, behaviour)

    @property
    def lenient(self) -> NDArray[np.bool_]:
        """`[B]` True if a row asks for SPEC-RL's rule."""
        return np.array([one.lenience is not None for one in self.kept])

    def uniforms(self, purpose: Purpose, policy_version: int) -> NDArray[np.float64]:
        """Return `[N]` numbers in (0, 1), one for each kept token."""
        seeds = forked(self.seeds, purpose, policy_version)[self.row]
        return uniforms(seeds, self.columns.positions)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of each row's kept tokens."""

    accepted: IntArray
    """`[B]` kept tokens that stay, with their lists and their noise."""
    token: NDArray[np.int64]
    """`[B]` the token after them; -1: none is drawn here, generation continues freely."""
    logprob: FloatArray
    """`[B]` its current log-probability."""
    noise_seed: SeedArray
    """`[B]` seeds of its noise. Its list is that of the kept token in its place."""
    renamed: NDArray[np.bool_]
    """`[B]` True if it is the kept token of its place, renamed by the same noise."""
    unnamed: NDArray[np.bool_]
    """`[B]` True if it lies outside its list and `name_tokens` has not been called for it yet."""

    def place(self, batch: KeptBatch, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index among the N kept tokens of each row's first that does not stay."""
        return np.asarray(batch.offsets[rows] + self.accepted[rows], np.int64)

    def outside(self, batch: KeptBatch, unnamed: NDArray[np.int64]) -> KeptColumns:
        """Return the lists, positions and noise that name the tokens of unnamed rows."""
        columns = batch.columns.part(self.place(batch, unnamed))
        return columns._replace(noise_seeds=self.noise_seed[unnamed])

    def set_names(
        self, unnamed: NDArray[np.int64], tokens: NDArray[np.int64], logprobs: FloatArray
    ) -> None:
        """Set the tokens of unnamed rows, and their current log-probabilities."""
        self.token[unnamed], self.logprob[unnamed] = tokens, logprobs
        self.unnamed[unnamed] = False


def judge(batch: KeptBatch, reading: Reading, policy_version: int) -> Verdict:
    """Accept a prefix of each row and draw the symbol after it. The reading must be finite."""
    rows = len(batch.kept)
    verdict = Verdict(
        accepted=np.zeros(rows, np.int32),
        token=np.full(rows, -1, np.int64),
        logprob=np.full(rows, np.nan, np.float32),
        noise_seed=noise_seeds(batch.seeds, policy_version),
        renamed=np.zeros(rows, np.bool_),
        unnamed=np.zeros(rows, np.bool_),
    )
    lenient = batch.lenient
    if not lenient.all():
        _judge_symbols(batch, reading, np.flatnonzero(~lenient), policy_version, verdict)
    if lenient.any():
        numbers = batch.uniforms(Purpose.ACCEPT, policy_version)
        for row in np.flatnonzero(lenient).tolist():
            kept, span = batch.kept[row], slice(batch.offsets[row], batch.offsets[row + 1])
            assert kept.lenience is not None  # noqa: S101 - for the type checker
            (verdict.accepted[row],) = accept_lenient(
                kept.logprobs, reading.own[span], [0, len(kept)], numbers[span], kept.lenience
            )
    return verdict


def _judge_symbols(
    batch: KeptBatch,
    reading: Reading,
    chosen: NDArray[np.int64],
    policy_version: int,
    verdict: Verdict,
) -> None:
    """Apply the exact rule to some rows of the batch; fill their part of the verdict."""
    columns = batch.columns
    part = np.flatnonzero(columns.exact)
    k = columns.ids.shape[1]
    numbers = [batch.uniforms(use, policy_version) for use in (Purpose.ACCEPT, Purpose.RESIDUAL)]
    verdicts = verify_kept(
        symbols_of(columns.tokens[part], columns.ids[part]),
        batch.behaviour[part],
        reading.listed[part],
        offsets=offsets_of(np.diff(batch.offsets)[chosen]),
        uniforms=np.stack(numbers, axis=1)[part],
        renamed=(reading.names != columns.tokens)[part],
    )
    verdict.accepted[chosen] = verdicts.accepted
    verdict.renamed[chosen] = verdicts.renamed
    verdict.unnamed[chosen] = (verdicts.symbol == k) & ~verdicts.renamed
    in_list = np.flatnonzero((verdicts.symbol >= 0) & (verdicts.symbol < k))
    rows, symbol = chosen[in_list], verdicts.symbol[in_list]
    at = verdict.place(batch, rows)
    verdict.token[rows], verdict.logprob[rows] = columns.ids[at, symbol], reading.listed[at, symbol]
    rows = chosen[verdicts.renamed]
    at = verdict.place(batch, rows)
    verdict.token[rows], verdict.logprob[rows] = reading.names[at], reading.name_logprobs[at]
    verdict.noise_seed[rows] = columns.noise_seeds[at]


def offsets_of(lengths: NDArray[np.integer[Any]]) -> IntArray:
    """Return `[n + 1]` offsets of a ragged array with rows of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ranges_of(
    starts: NDArray[np.integer[Any]], lengths: NDArray[np.integer[Any]]
) -> NDArray[np.int64]:
    """Return `[sum(lengths)]` numbers: `lengths[i]` from `starts[i]` on, row after row."""
    before = np.cumsum(lengths, dtype=np.int64) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - before, lengths)
