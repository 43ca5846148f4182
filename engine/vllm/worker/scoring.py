"""Scores given tokens and verifies kept ones inside vLLM's model runner, as tokens are sampled.

vLLM computes `prompt_logprobs` one request after the other, for all of a prompt, from raw logits:
it leaves out temperature and truncation (`GPUModelRunner._get_prompt_logprobs_dict`, 0.32.0).
`CoreScorer` replaces that method. It handles all requests of a step together, only the positions
that were asked for, with the processed distribution. Kept tokens are judged here, where the whole
current distribution is (`engine.verification`): only what becomes of them travels.

The result replaces vLLM's table: a row for each token that is reported, with the columns of
`engine.vllm.extras.ScoreColumns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.logits import LogitReading, read_from_logits, rows_at_once, slabs
from engine.sampling import SamplingColumns, processed_logprobs
from engine.verification import KeptBatch, KeptColumns, Reading, Verdict, judge, name_tokens
from engine.vllm.worker.batch import Batch
from engine.vllm.worker.scored import ScoredPart, ScoredRequest, batch_of
from rollout.trajectory import FloatArray, IntArray


class CoreScorer:
    """Computes prompt log-probabilities for a model runner.

    Args:
        runner: vLLM's `GPUModelRunner`.
        batch: its requests.
        max_bytes: memory that scoring may hold at once (`engine.logits`).
    """

    def __init__(self, runner: Any, batch: Batch, max_bytes: int) -> None:
        self._runner = runner
        self._batch = batch
        self._max_bytes = max_bytes
        self._requests: dict[str, ScoredRequest] = {}

    def install(self) -> None:
        """Replace the method on this runner."""
        self._runner._get_prompt_logprobs_dict = self.compute  # noqa: SLF001

    @torch.inference_mode()
    def compute(self, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        """The tables of the requests whose prompts are complete after this step, as vLLM's."""
        pending: dict[str, int] = self._runner.num_prompt_logprobs
        if not pending:
            self._requests.clear()  # their prompts were aborted
            return {}
        parts: list[ScoredPart] = []
        done: list[str] = []
        for request_id, k in pending.items():
            count = scheduled.get(request_id)
            if count is None:
                continue  # preempted in the middle of its prompt
            part, whole = self._part(request_id, k, count)
            parts.append(part)
            if whole:
                done.append(request_id)
        self._read_all(hidden_states, parts)
        for request_id in done:
            del pending[request_id]
        tables = self._tables({request_id: self._requests.pop(request_id) for request_id in done})
        self._requests = {name: one for name, one in self._requests.items() if name in pending}
        return tables

    def _part(self, request_id: str, k: int, count: int) -> tuple[ScoredPart, bool]:
        runner, entry = self._runner, self._batch.entry(request_id)
        total = len(entry.context)
        begin = int(runner.requests[request_id].num_computed_tokens)
        # The state at position i says what follows: token i + 1.
        first = total - 1 - entry.extra.scored
        low, high = max(begin, first), min(begin + count, total - 1)
        row = runner.input_batch.req_id_to_index[request_id]
        offset = int(runner.query_start_loc.np[row]) - begin
        rows = np.arange(low, max(high, low)) + offset
        if request_id not in self._requests:
            self._requests[request_id] = ScoredRequest(entry, k)
        return ScoredPart(self._requests[request_id], rows, low - first), begin + count >= total

    def _read_all(self, hidden_states: torch.Tensor, parts: list[ScoredPart]) -> None:
        """Read in slabs: the output layer, too, is asked for one slab at a time."""
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
                    self._read(hidden_states, batch)
                    batch, held = [], 0
        if batch:
            self._read(hidden_states, batch)

    def _read(self, hidden_states: torch.Tensor, parts: list[ScoredPart]) -> None:
        """Look up what is needed of these parts; `N` scored positions, part by part."""
        rows = torch.from_numpy(np.concatenate([part.rows for part in parts]))
        hidden = hidden_states[rows.to(hidden_states.device)]
        counts = np.array([len(part.rows) for part in parts])
        k = max(part.request.k if part.request.reports_top_k else 0 for part in parts)
        found = read_from_logits(
            self._runner.model.compute_logits(hidden),
            _sampling([part.request for part in parts], counts),
            KeptColumns.concatenated([part.request.columns.part(part.span) for part in parts]),
            k,
        )
        ends = np.cumsum(counts).tolist()
        for part, end in zip(parts, ends, strict=True):
            source = slice(end - len(part.rows), end)
            part.request.keep_hidden(part.first, hidden[source])
            _fill(part, found, source)

    def _tables(self, done: dict[str, ScoredRequest]) -> dict[str, Any]:
        """The results as vLLM takes them. What is not finite is not judged: the reader refuses."""
        judged = {
            name: one
            for name, one in done.items()
            if one.kept is not None and not one.reading.not_finite().any()
        }
        tables = {name: one.table() for name, one in done.items() if name not in judged}
        if judged:
            tables |= zip(judged, self._judge(list(judged.values())), strict=True)
        return {name: _as_vllm(*table) for name, table in tables.items()}

    def _judge(self, requests: list[ScoredRequest]) -> list[tuple[IntArray, FloatArray]]:
        """The verdicts on the kept tokens of some requests."""
        k = max(request.k for request in requests)
        batch = batch_of(requests, k)
        reading = Reading.concatenated([request.reading for request in requests])
        verdict = judge(batch, reading, self._batch.policy_version)
        sampling = SamplingColumns.of([one.entry.sampling for one in requests])
        unnamed = np.flatnonzero(verdict.unnamed)
        for part in slabs(len(unnamed), self._rows_at_once(sampling)):
            self._name(requests, batch, verdict, unnamed[part])
        return [one.verdict_table(verdict, row) for row, one in enumerate(requests)]

    def _name(
        self,
        requests: list[ScoredRequest],
        batch: KeptBatch,
        verdict: Verdict,
        rows: NDArray[np.int64],
    ) -> None:
        """Name the unnamed tokens of some rows of the verdict."""
        chosen = [requests[row] for row in rows]
        accepted = verdict.accepted[rows].tolist()
        hidden = [one.hidden_at(at) for one, at in zip(chosen, accepted, strict=True)]
        logits = self._runner.model.compute_logits(torch.stack(hidden))
        sampling = SamplingColumns.of([one.entry.sampling for one in chosen])
        logprobs = processed_logprobs(logits.float(), sampling)
        name_tokens(batch, verdict, rows, logprobs, np.arange(len(rows)))

    def _rows_at_once(self, sampling: SamplingColumns) -> int:
        """Most rows of a slab."""
        vocabulary = self._runner.model_config.get_vocab_size()
        return rows_at_once(vocabulary, sampling, self._max_bytes)


def _sampling(requests: Sequence[ScoredRequest], counts: NDArray[np.int64]) -> SamplingColumns:
    """How the tokens of scored positions are drawn, `counts` of each request."""
    columns = SamplingColumns.of([request.entry.sampling for request in requests])
    return columns.at(np.repeat(np.arange(len(requests)), counts))


def _fill(part: ScoredPart, found: LogitReading, source: slice) -> None:
    """Take over what was found at a part's rows of a slab."""
    request = part.request
    request.reading.fill(part.span, found.reading, source)
    if request.reports_top_k and found.listed is not None:
        ids, values = (one[source, : request.k] for one in found.listed)
        request.ids[part.span], request.values[part.span] = ids.cpu().numpy(), values.cpu().numpy()


def _as_vllm(ids: IntArray, values: FloatArray) -> Any:
    from vllm.v1.outputs import LogprobsTensors

    ranks = torch.zeros(len(ids), dtype=torch.int32)
    return LogprobsTensors(torch.from_numpy(ids), torch.from_numpy(values), ranks)
