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
from engine.vllm.worker.ranks import Ranks
from engine.vllm.worker.scored import ScoredPart, ScoredRequest, batch_of
from rollout.trajectory import FloatArray, IntArray


class CoreScorer:
    """Computes prompt log-probabilities for a model runner.

    Args:
        runner: vLLM's `GPUModelRunner`.
        batch: its requests.
        ranks: of this worker; rank 0 scores, the others take part in the output layer.
        max_bytes: memory that scoring may hold at once (`engine.logits`).
    """

    def __init__(self, runner: Any, batch: Batch, ranks: Ranks, max_bytes: int) -> None:
        self._runner = runner
        self._batch = batch
        self._ranks = ranks
        self._max_bytes = max_bytes
        self._requests: dict[str, ScoredRequest] = {}

    def install(self) -> None:
        """Replace the method on this runner."""
        self._runner._get_prompt_logprobs_dict = self.compute  # noqa: SLF001

    @torch.inference_mode()
    def compute(self, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        """The tables of the requests whose prompts are complete after this step, as vLLM's.

        Empty in ranks other than 0.
        """
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
        logits = self._runner.model.compute_logits(hidden)
        counts = [len(part.rows) for part in parts]
        sources = [slice(end - n, end) for end, n in zip(np.cumsum(counts), counts, strict=True)]
        for part, source in zip(parts, sources, strict=True):
            part.request.keep_hidden(part.first, hidden[source])
        if not self._ranks.leads:
            return
        found = read_from_logits(
            logits,
            _sampling([part.request for part in parts], np.array(counts)),
            KeptColumns.concatenated([part.request.columns.part(part.span) for part in parts]),
            max(part.request.k if part.request.reports_top_k else 0 for part in parts),
        )
        for part, source in zip(parts, sources, strict=True):
            _fill(part, found, source)

    def _tables(self, done: dict[str, ScoredRequest]) -> dict[str, Any]:
        """The results as vLLM takes them. What is not finite is not judged: the reader refuses."""
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
            verdict = judge(batch, reading, self._batch.policy_version)
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
        return {name: _as_vllm(*table) for name, table in tables.items()}

    def _name_all(
        self,
        done: dict[str, ScoredRequest],
        judged: list[str],
        batch: KeptBatch | None,
        verdict: Verdict | None,
    ) -> None:
        """Name all unnamed tokens of a verdict, which rank 0 has. All ranks compute the logits.

        Args:
            done: requests whose prompts are complete.
            judged: names of the verdict's rows.
            batch: of the verdict.
            verdict: None in other ranks, and if nothing is judged.
        """
        rows = np.empty(0, np.int64) if verdict is None else np.flatnonzero(verdict.unnamed)
        places = [] if verdict is None else verdict.accepted[rows].tolist()
        unnamed = [(judged[row], place) for row, place in zip(rows.tolist(), places, strict=True)]
        unnamed = self._ranks.share(unnamed)
        chosen = [done[name] for name, _ in unnamed]
        sampling = SamplingColumns.of([one.entry.sampling for one in chosen])
        for part in slabs(len(unnamed), self._rows_at_once(sampling)):
            hidden = [done[name].hidden_at(place) for name, place in unnamed[part]]
            logits = self._runner.model.compute_logits(torch.stack(hidden))
            if verdict is not None and batch is not None:
                these = sampling.at(np.arange(part.start, part.stop))
                logprobs = processed_logprobs(logits.float(), these)
                name_tokens(batch, verdict, rows[part], logprobs, np.arange(len(logits)))

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
