"""Scores given tokens and verifies kept ones from the hidden states of their prompts.

Only the scored positions go through the output layer, those of all requests of a step together, in
slabs of bounded memory, with the processed distribution. Kept tokens are judged here, where the
whole current distribution is (`engine.sampling.verification`): only the outcomes travel.

A prompt is taken in part by part. The values that the verdict needs are looked up while each
position's distribution exists. Of the distributions only the hidden states are kept: a token may
have to be drawn at one place, known only at the end. A preempted prompt begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.remote.extras import Outcome, ScoreColumns
from asyncrl.engine.remote.worker.entries import Entry
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.sampling.logits import (
    distributions_of,
    read_from_logits,
    rows_at_once,
    slabs,
)
from asyncrl.engine.sampling.truncation import SamplingColumns
from asyncrl.engine.sampling.verification import KeptBatch, KeptColumns, Reading, Verdict, judge
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
            ids[accepted, columns.own] = token
            values[accepted, columns.own] = verdict.logprob[row]
            outcome = Outcome.RENAMED if verdict.renamed[row] else Outcome.DRAWN
            ids[accepted, columns.outcome] = outcome
        return ids[:count], values[:count]


def batch_of(requests: Sequence[ScoredRequest], k: int) -> KeptBatch:
    """Collect the kept tokens of some requests, to be judged together."""
    return KeptBatch.of(
        [request.kept for request in requests if request.kept is not None],
        np.array([request.entry.extra.seed for request in requests], np.uint64),
        np.array([request.first_position for request in requests], np.int64),
        k,
    )


@dataclass
class Scorer:
    """Reads and judges scored positions. All ranks make the same calls, with the same requests."""

    _compute_logits: Callable[[torch.Tensor], torch.Tensor]
    """The output layer, `[n, H]` to `[n, >= V]`, in which all ranks take part."""
    _vocab_size: int
    _ranks: Ranks
    _max_bytes: int
    """Memory that scoring holds at once."""
    _listed: int
    """K of the engine, at least that of reported lists."""
    requests: dict[str, ScoredRequest] = field(default_factory=dict)
    """Requests whose prompts are being taken in."""

    def forget(self, alive: Container[str]) -> None:
        """Drop requests that are not `alive` any more; they may hold hidden states."""
        self.requests = {name: one for name, one in self.requests.items() if name in alive}

    def score(
        self,
        hidden_states: torch.Tensor,
        rows: Iterable[tuple[str, Entry, int, int, int, int]],
        policy_version: int,
    ) -> dict[str, tuple[IntArray, FloatArray]]:
        """Take in a step with `hidden_states` `[T, H]`; return the tables of complete requests.

        `rows` are the scored requests of the step: name, entry, K of the most probable tokens, and
        the arguments of `ScoredRequest.part`. A request in `requests` is not complete.
        """
        parts: list[ScoredPart] = []
        done: dict[str, ScoredRequest] = {}
        for name, entry, k, begin, count, offset in rows:
            if name not in self.requests:
                self.requests[name] = ScoredRequest(entry, k)
            part, complete = self.requests[name].part(begin, count, offset)
            parts.append(part)
            if complete:
                done[name] = self.requests.pop(name)
        self._read(hidden_states, parts)
        return self._tables(done, policy_version)

    def _read(self, hidden_states: torch.Tensor, parts: list[ScoredPart]) -> None:
        """Read the scored positions of a step, whose hidden states are `[T, H]`, in slabs."""
        sampling = SamplingColumns.of([part.request.entry.sampling for part in parts])
        limit = self._rows_at_once(sampling)
        batch: list[ScoredPart] = []
        held = 0
        for part in parts:
            left = part
            while len(left.rows):
                piece, left = left.split(limit - held)
                batch.append(piece)
                held += len(piece.rows)
                if held == limit:
                    self._read_slab(hidden_states, batch)
                    batch, held = [], 0
        if batch:
            self._read_slab(hidden_states, batch)

    def _read_slab(self, hidden_states: torch.Tensor, parts: list[ScoredPart]) -> None:
        """Look up the values of these parts; `N` scored positions, part by part."""
        rows = torch.from_numpy(np.concatenate([part.rows for part in parts]))
        hidden = hidden_states[rows.to(hidden_states.device)]
        logits = self._compute_logits(hidden)
        counts = [len(part.rows) for part in parts]
        sources = [slice(end - n, end) for end, n in zip(np.cumsum(counts), counts, strict=True)]
        for part, source in zip(parts, sources, strict=True):
            part.request.keep_hidden(part.first, hidden[source])
        if not self._ranks.leads:
            return
        sampling = SamplingColumns.of([part.request.entry.sampling for part in parts])
        found = read_from_logits(
            logits,
            sampling.at(np.repeat(np.arange(len(parts)), counts)),
            KeptColumns.concatenated([part.request.columns.part(part.span) for part in parts]),
            max(part.request.k if part.request.reports_top_k else 0 for part in parts),
            listed=self._listed,
        )
        for part, source in zip(parts, sources, strict=True):
            request = part.request
            request.reading.fill(part.span, found.reading, source)
            if request.reports_top_k and found.listed is not None:
                ids, values = (one[source, : request.k].cpu().numpy() for one in found.listed)
                request.ids[part.span], request.values[part.span] = ids, values

    def _tables(
        self, done: dict[str, ScoredRequest], policy_version: int
    ) -> dict[str, tuple[IntArray, FloatArray]]:
        """Return the tables of requests whose prompts are complete; empty in ranks other than 0.

        `done` is the same in all ranks. Non-finite values are not judged: the reader refuses them.
        """
        judged: dict[str, ScoredRequest] = {}
        verdict = batch = None
        if self._ranks.leads:
            judged = {
                name: one
                for name, one in done.items()
                if one.kept is not None and not one.reading.not_finite().any()
            }
        if judged:
            requests = list(judged.values())
            batch = batch_of(requests, max(request.k for request in requests))
            reading = Reading.concatenated([request.reading for request in requests])
            verdict = judge(batch, reading, policy_version)
        if any(one.kept is not None for one in done.values()):
            self._name_all(done, list(judged), batch, verdict)
        if not self._ranks.leads:
            return {}
        tables = {name: one.table() for name, one in done.items() if name not in judged}
        if verdict is not None:
            tables |= {
                name: one.verdict_table(verdict, row)
                for row, (name, one) in enumerate(judged.items())
            }
        return tables

    def _name_all(
        self,
        done: dict[str, ScoredRequest],
        judged: list[str],
        batch: KeptBatch | None,
        verdict: Verdict | None,
    ) -> None:
        """Name all unnamed tokens of rank 0's verdict (None in other ranks), in rows `judged`."""
        rows = np.empty(0, np.int64) if verdict is None else np.flatnonzero(verdict.unnamed)
        places = [] if verdict is None else verdict.accepted[rows].tolist()
        unnamed = [(judged[row], place) for row, place in zip(rows.tolist(), places, strict=True)]
        unnamed = self._ranks.share(unnamed)
        chosen = [done[name] for name, _ in unnamed]
        sampling = SamplingColumns.of([one.entry.sampling for one in chosen])
        for part in slabs(len(unnamed), self._rows_at_once(sampling)):
            hidden = [done[name].hidden_at(place) for name, place in unnamed[part]]
            logits = self._compute_logits(torch.stack(hidden))
            if verdict is not None and batch is not None:
                these = sampling.at(np.arange(part.start, part.stop))
                distributions = distributions_of(logits, these, self._listed)
                distributions.name_tokens(batch, verdict, rows[part], np.arange(len(logits)))

    def _rows_at_once(self, sampling: SamplingColumns) -> int:
        return rows_at_once(self._vocab_size, sampling, self._max_bytes)
