"""Computes log-probabilities of given tokens inside vLLM's model runner, as they are sampled.

vLLM computes `prompt_logprobs` one request after the other, for all of a prompt, from raw logits:
it leaves out temperature and truncation (`GPUModelRunner._get_prompt_logprobs_dict`, 0.32.0).
`CoreScorer` replaces that method. It handles all requests of a step together, only the positions
that were asked for, with the processed distribution, and adds one draw at each position from what
lies outside the listed tokens (see `engine.protocol.Score.tail_ids`).

The result replaces vLLM's table: a row for each scored token, with the columns of
`engine.vllm.extras.ScoreColumns`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling import (
    MAX_LOGITS,
    Purpose,
    SamplingColumns,
    draw_outside,
    forked,
    processed_logprobs,
    uniforms,
)
from engine.vllm.extras import ScoreColumns
from engine.vllm.worker.batch import Batch, Entry
from rollout.trajectory import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class _Part:
    """Scored positions of one request that a step has the hidden states of."""

    request_id: str
    entry: Entry
    columns: ScoreColumns
    rows: NDArray[np.int64]
    """`[n]` rows of the step's hidden states."""
    first: int
    """Index of the first one among all scored positions of the request."""

    @property
    def known(self) -> IntArray | None:
        """`[n, K']` ids that the request named at these positions."""
        known = self.entry.extra.known
        return None if known is None else known[self.first : self.first + len(self.rows)]


class CoreScorer:
    """Computes prompt log-probabilities for a model runner.

    Args:
        runner: vLLM's `GPUModelRunner`.
        batch: its requests.
    """

    def __init__(self, runner: Any, batch: Batch) -> None:
        self._runner = runner
        self._batch = batch
        self._tables: dict[str, tuple[IntArray, FloatArray]] = {}
        self.policy_version = 0
        """Of the weights that are loaded."""

    def install(self) -> None:
        """Replace the method on this runner."""
        self._runner._get_prompt_logprobs_dict = self.compute  # noqa: SLF001

    @torch.inference_mode()
    def compute(self, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        """The tables of the requests whose prompts are complete after this step, as vLLM's."""
        pending: dict[str, int] = self._runner.num_prompt_logprobs
        if not pending:
            return {}
        parts: list[_Part] = []
        done: list[str] = []
        for request_id, k in pending.items():
            count = scheduled.get(request_id)
            if count is None:
                continue  # preempted in the middle of its prompt
            part, whole = self._part(request_id, k, count)
            parts.append(part)
            if whole:
                done.append(request_id)
        self._fill(hidden_states, parts)
        for request_id in done:
            del pending[request_id]
        tables = {request_id: _as_vllm(*self._tables.pop(request_id)) for request_id in done}
        self._tables = {name: t for name, t in self._tables.items() if name in pending}
        return tables

    def _part(self, request_id: str, k: int, count: int) -> tuple[_Part, bool]:
        runner, entry = self._runner, self._batch.entry(request_id)
        total = len(entry.context)
        begin = int(runner.requests[request_id].num_computed_tokens)
        # The state at position i says what follows: token i + 1.
        first = total - 1 - entry.extra.scored
        low, high = max(begin, first), min(begin + count, total - 1)
        row = runner.input_batch.req_id_to_index[request_id]
        offset = int(runner.query_start_loc.np[row]) - begin
        rows = np.arange(low, max(high, low)) + offset
        known = entry.extra.known
        columns = ScoreColumns(k, 0 if known is None else known.shape[1])
        if request_id not in self._tables:
            shape = entry.extra.scored, columns.width
            self._tables[request_id] = np.empty(shape, np.int32), np.empty(shape, np.float32)
        return _Part(request_id, entry, columns, rows, low - first), begin + count >= total

    def _fill(self, hidden_states: torch.Tensor, parts: list[_Part]) -> None:
        """Score in batches of parts, so that at most `MAX_LOGITS` logits are held at once."""
        vocab = self._runner.model_config.get_vocab_size()
        batch: list[_Part] = []
        held = 0
        for part in parts:
            wanted = len(part.rows) * vocab
            if batch and held + wanted > MAX_LOGITS:
                self._score(hidden_states, batch)
                batch, held = [], 0
            if wanted:
                batch.append(part)
                held += wanted
        if batch:
            self._score(hidden_states, batch)

    def _score(self, hidden_states: torch.Tensor, parts: list[_Part]) -> None:
        """Fill the tables of these parts; `N` scored positions, part by part."""
        counts = np.array([len(part.rows) for part in parts])
        rows = torch.from_numpy(np.concatenate([part.rows for part in parts]))
        logits = self._runner.model.compute_logits(hidden_states[rows.to(hidden_states.device)])
        entries = [part.entry for part in parts]
        logprobs = processed_logprobs(
            logits.float(),
            SamplingColumns.of([entry.sampling for entry in entries]).at(
                np.repeat(np.arange(len(entries)), counts)
            ),
        )
        own = np.concatenate([_scored_tokens(part) for part in parts])
        asked = np.concatenate([own[:, None], _named(parts)], axis=1)
        max_k = max(part.columns.k for part in parts)
        values, ids = torch.topk(logprobs, min(max_k, logprobs.shape[1]), dim=1)
        listed = _pad(ids.cpu().numpy().astype(np.int32), max_k)
        listed_logprobs = _pad(values.float().cpu().numpy(), max_k, -np.inf)
        outside_of = _left_out(parts, asked[:, 1:], listed)
        tail, tail_logprobs = draw_outside(logprobs, outside_of, self._numbers(parts, counts))
        asked_logprobs = _at(logprobs, asked)
        ends = np.cumsum(counts).tolist()
        for part, end in zip(parts, ends, strict=True):
            span = slice(end - len(part.rows), end)
            ids_of, logprobs_of = self._tables[part.request_id]
            _store(part, ids_of, asked[span], listed[span], tail[span])
            _store(
                part,
                logprobs_of,
                asked_logprobs[span],
                listed_logprobs[span],
                tail_logprobs[span],
            )

    def _numbers(self, parts: list[_Part], counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """`[N]` the uniform numbers of the tail draws, of streams that draw nothing else."""
        seeds = np.repeat(np.array([part.entry.extra.seed for part in parts], np.uint64), counts)
        position = np.concatenate(
            [_first_token(part) - part.entry.start + np.arange(len(part.rows)) for part in parts]
        )
        return uniforms(forked(seeds, Purpose.TAIL, self.policy_version), position)


def _named(parts: list[_Part]) -> IntArray:
    """`[N, K']` ids that requests named at their positions, padded with -1."""
    width = max(part.columns.known for part in parts)
    tables = [
        np.empty((len(part.rows), 0), np.int32) if part.known is None else part.known
        for part in parts
    ]
    return np.concatenate([_pad(table, width) for table in tables])


def _left_out(parts: list[_Part], named: IntArray, listed: IntArray) -> IntArray:
    """`[N, C]` ids that each tail draw leaves out, padded with -1.

    Those that the request named, otherwise the K most probable that it asked for.
    """
    counts = [len(part.rows) for part in parts]
    k = np.repeat([part.columns.k for part in parts], counts)
    reported = np.where(np.arange(listed.shape[1]) < k[:, None], listed, -1)
    width = max(named.shape[1], listed.shape[1])
    has_named = np.repeat([part.known is not None for part in parts], counts)
    return np.where(has_named[:, None], _pad(named, width), _pad(reported, width))


def _store(
    part: _Part,
    table: NDArray[Any],
    asked: NDArray[Any],
    listed: NDArray[Any],
    tail: NDArray[Any],
) -> None:
    """Write the part's rows of a request's table, of ids or of log-probabilities.

    Args:
        part: `n` scored positions.
        table: of the request.
        asked: `[n, 1 + K']` the tokens themselves, then those that were named.
        listed: `[n, K]` the most probable ones.
        tail: `[n]`
    """
    out, columns = table[part.first : part.first + len(part.rows)], part.columns
    out[:, columns.own] = asked[:, 0]
    out[:, columns.top_k] = listed[:, : columns.k]
    out[:, columns.tail] = tail
    out[:, columns.named] = asked[:, 1 : 1 + columns.known]


def _first_token(part: _Part) -> int:
    """Place of the part's first scored token in the request's context."""
    return len(part.entry.context) - part.entry.extra.scored + part.first


def _scored_tokens(part: _Part) -> IntArray:
    start = _first_token(part)
    return part.entry.context[start : start + len(part.rows)]


def _at(logprobs: torch.Tensor, ids: IntArray) -> FloatArray:
    """`[N, C]` log-probabilities at ids, -inf where an id is -1."""
    index = torch.from_numpy(ids.clip(min=0).astype(np.int64)).to(logprobs.device)
    values = logprobs.gather(1, index).float().cpu().numpy()
    return np.where(ids >= 0, values, np.float32(-np.inf))


def _pad(table: NDArray[Any], width: int, fill: float = -1) -> NDArray[Any]:
    lacking = width - table.shape[1]
    if lacking <= 0:
        return table
    return np.pad(table, ((0, 0), (0, lacking)), constant_values=fill)


def _as_vllm(ids: IntArray, values: FloatArray) -> Any:
    from vllm.v1.outputs import LogprobsTensors

    ranks = torch.zeros(len(ids), dtype=torch.int32)
    return LogprobsTensors(torch.from_numpy(ids), torch.from_numpy(values), ranks)
