"""A request whose tokens are scored or verified, while its prompt is taken in part by part.

The values that the verdict needs are looked up while each position's distribution exists. Of the
distributions only the hidden states are kept: a token may have to be drawn at one place, known only
at the end. A preempted prompt begins again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.remote.extras import Outcome, ScoreColumns
from asyncrl.engine.remote.worker.entries import Entry
from asyncrl.engine.sampling.verification import KeptBatch, KeptColumns, Reading, Verdict
from asyncrl.rollout.trajectory import FloatArray, IntArray, KeptTokens


@dataclass(frozen=True, slots=True)
class ScoredPart:
    """Scored positions of one request that a step has the hidden states of."""

    request: ScoredRequest
    rows: NDArray[np.int64]
    """`[n]` rows of the step's hidden states."""
    first: int
    """Index of the first one among all scored positions of the request."""

    @property
    def span(self) -> slice:
        """Range among all scored positions of the request."""
        return slice(self.first, self.first + len(self.rows))

    def split(self, count: int) -> tuple[ScoredPart, ScoredPart]:
        """Split into the first `count` positions and the rest."""
        return (
            ScoredPart(self.request, self.rows[:count], self.first),
            ScoredPart(self.request, self.rows[count:], self.first + count),
        )


class ScoredRequest:
    """The n scored tokens of one request, with lists of K ids.

    `top_k` is K of the most probable tokens, reported unless the lists of kept tokens are.
    """

    def __init__(self, entry: Entry, top_k: int) -> None:
        extra = entry.extra
        n = extra.scored
        self.entry = entry
        self.kept: KeptTokens | None = extra.kept
        self.first_position = extra.generated - n
        """Position of the first scored token in the response."""
        if extra.kept is None:
            self.columns = KeptColumns.only_tokens(entry.context[-n:], top_k)
        else:
            k = top_k if extra.kept.lenience is not None else extra.kept.topk_ids.shape[1]
            self.columns = batch_of([self], k).columns
        self.k: int = self.columns.ids.shape[1]
        self.reading = Reading.empty(n, self.k)
        self.reports_top_k = not self.columns.exact.all()
        """True if the current K most probable tokens are reported."""
        self.ids = self.columns.ids.copy()
        self.values: FloatArray = np.full((n, self.k), -np.inf, np.float32)
        """`[n, K]`"""
        self._hidden: list[tuple[int, torch.Tensor]] = []

    def part(self, begin: int, count: int, offset: int) -> tuple[ScoredPart, bool]:
        """Return a step's part of it, and True if its prompt is then complete.

        The step takes in `count` tokens after the first `begin`, in its rows from `offset` on.
        """
        total = len(self.entry.context)
        # The state at position i predicts token i + 1.
        first = total - 1 - self.entry.extra.scored
        low, high = max(begin, first), min(begin + count, total - 1)
        rows = np.arange(low, max(high, low)) + offset - begin
        return ScoredPart(self, rows, low - first), begin + count >= total

    def keep_hidden(self, first: int, hidden: torch.Tensor) -> None:
        """Keep hidden states `[n, H]` from scored position `first`, replacing earlier ones."""
        if self.kept is None or self.reports_top_k:
            return
        while self._hidden and self._hidden[-1][0] >= first:
            self._hidden.pop()
        self._hidden.append((first, hidden.clone()))

    def hidden_at(self, index: int) -> torch.Tensor:
        """Return the state `[H]` at one of the scored positions."""
        first, hidden = next(part for part in reversed(self._hidden) if part[0] <= index)
        return hidden[index - first]

    def table(self) -> tuple[IntArray, FloatArray]:
        """Return the scores, laid out as `ScoreColumns`."""
        columns = ScoreColumns(self.k)
        ids = np.full((len(self.ids), columns.width), Outcome.KEPT, np.int32)
        values = np.zeros(ids.shape, np.float32)
        ids[:, columns.own], values[:, columns.own] = self.columns.tokens, self.reading.own
        ids[:, columns.listed] = self.ids
        values[:, columns.listed] = self.values if self.reports_top_k else self.reading.listed
        return ids, values

    def verdict_table(self, verdict: Verdict, row: int) -> tuple[IntArray, FloatArray]:
        """Return row `row` of the complete `verdict` and its kept tokens, as `ScoreColumns`."""
        accepted, token = int(verdict.accepted[row]), verdict.token[row]
        count = accepted + int(token >= 0)
        ids, values = self.table()
        columns = ScoreColumns(self.k)
        if token >= 0:
            renamed = verdict.renamed[row]
            ids[accepted, columns.own] = token
            values[accepted, columns.own] = verdict.logprob[row]
            ids[accepted, columns.outcome] = Outcome.RENAMED if renamed else Outcome.DRAWN
        return ids[:count], values[:count]


def batch_of(requests: Sequence[ScoredRequest], k: int) -> KeptBatch:
    """Collect the kept tokens of some requests, to be judged together."""
    return KeptBatch.of(
        [request.kept for request in requests if request.kept is not None],
        np.array([request.entry.extra.seed for request in requests], np.uint64),
        np.array([request.first_position for request in requests], np.int64),
        k,
    )
