"""Log-probabilities of given tokens, inside vLLM's model runner, under what is sampled from.

vLLM computes `prompt_logprobs` one request after the other, for all of a prompt, from raw logits:
temperature and top-p are left out (`GPUModelRunner._get_prompt_logprobs_dict`, 0.32.0).
`CoreScorer` takes that method's place: all requests of a step together, only the positions that
were asked for, the processed distribution, and one more draw at each position: from what lies
outside the tokens that are reported (see `engine.protocol.Score.tail_ids`).

What comes back is a table in the place of vLLM's, a row per scored token, with the columns
own token | K most probable | tail draw | K' tokens that the request named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling import MAX_LOGITS, Purpose, draw_outside, forked, processed_logprobs, uniforms
from engine.vllm.worker.batch import Batch, Entry
from rollout.trajectory import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class _Part:
    """Scored positions of one request that a step has the hidden states of."""

    request_id: str
    entry: Entry
    k: int
    rows: NDArray[np.int64]
    """`[n]` rows of the step's hidden states."""
    at: int
    """The first one's index among all scored positions of the request."""


class CoreScorer:
    """Computes prompt log-probabilities for a model runner."""

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
        """As vLLM's: a table for each request whose prompt has been taken in by this step."""
        pending: dict[str, int] = self._runner.num_prompt_logprobs
        if not pending:
            return {}
        parts: list[_Part] = []
        done: list[str] = []
        for request_id, k in pending.items():
            count = scheduled.get(request_id)
            if count is None:
                continue  # preempted while its prompt was taken in
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
        first = total - 1 - entry.scored
        low, high = max(begin, first), min(begin + count, total - 1)
        row = runner.input_batch.req_id_to_index[request_id]
        offset = int(runner.query_start_loc.np[row]) - begin
        rows = np.arange(low, max(high, low)) + offset
        if request_id not in self._tables:
            width = 2 + k + (0 if entry.known is None else entry.known.shape[1])
            self._tables[request_id] = (
                np.empty((entry.scored, width), np.int32),
                np.empty((entry.scored, width), np.float32),
            )
        return _Part(request_id, entry, k, rows, low - first), begin + count >= total

    def _fill(self, hidden_states: torch.Tensor, parts: list[_Part]) -> None:
        """Batches of parts, so that a bounded number of logits is held at once."""
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
        counts = np.array([len(part.rows) for part in parts])
        rows = torch.from_numpy(np.concatenate([part.rows for part in parts]))
        logits = self._runner.model.compute_logits(hidden_states[rows.to(hidden_states.device)])
        entries = [part.entry for part in parts]
        logprobs = processed_logprobs(
            logits.float(),
            np.repeat(np.array([entry.temperature for entry in entries], np.float32), counts),
            np.repeat(np.array([entry.top_p for entry in entries], np.float32), counts),
        )
        own = np.concatenate([_scored_tokens(part) for part in parts])
        most = max(part.k for part in parts)
        values, ids = torch.topk(logprobs, min(most, logprobs.shape[1]), dim=1)
        listed_ids = ids.cpu().numpy().astype(np.int32)
        listed = _pad(listed_ids, most)
        listed_values = _pad(values.float().cpu().numpy(), most, -np.inf)
        reported = np.repeat([part.k for part in parts], counts)
        outside_of = np.where(np.arange(most) < reported[:, None], listed, -1)
        named = self._named(parts, counts)
        if named is not None:
            width = max(named.shape[1], most)
            has = np.repeat([entry.known is not None for entry in entries], counts)
            outside_of = np.where(has[:, None], _pad(named, width), _pad(outside_of, width))
        tail_ids, tail_values = draw_outside(logprobs, outside_of, self._numbers(parts, counts))
        columns = [own[:, None]] if named is None else [own[:, None], named]
        asked = _at(logprobs, np.concatenate(columns, axis=1))
        for part, end in zip(parts, np.cumsum(counts), strict=True):
            span, k = slice(end - len(part.rows), end), part.k
            out_ids, out_values = (
                table[part.at : part.at + len(part.rows)] for table in self._tables[part.request_id]
            )
            out_ids[:, 0], out_values[:, 0] = own[span], asked[span, 0]
            out_ids[:, 1 : 1 + k] = listed[span, :k]
            out_values[:, 1 : 1 + k] = listed_values[span, :k]
            out_ids[:, 1 + k], out_values[:, 1 + k] = tail_ids[span], tail_values[span]
            if named is not None and part.entry.known is not None:
                width = part.entry.known.shape[1]
                out_ids[:, 2 + k :] = named[span, :width]
                out_values[:, 2 + k :] = asked[span, 1 : 1 + width]

    def _numbers(self, parts: list[_Part], counts: NDArray[np.int64]) -> NDArray[np.float64]:
        seeds = np.repeat(np.array([part.entry.seed for part in parts], np.uint64), counts)
        position = np.concatenate(
            [len(p.entry.context) - p.entry.scored + p.at + np.arange(len(p.rows)) for p in parts]
        ) - np.repeat([part.entry.start for part in parts], counts)
        return uniforms(forked(seeds, Purpose.TAIL, self.policy_version), position)

    def _named(self, parts: list[_Part], counts: NDArray[np.int64]) -> IntArray | None:
        """`[N, K']` ids that requests named at their positions, padded with -1."""
        width = max(
            (p.entry.known.shape[1] for p in parts if p.entry.known is not None), default=-1
        )
        if width < 0:
            return None
        named = np.full((int(counts.sum()), width), -1, np.int32)
        for part, end in zip(parts, np.cumsum(counts), strict=True):
            known = part.entry.known
            if known is not None:
                n = len(part.rows)
                named[end - n : end, : known.shape[1]] = known[part.at : part.at + n]
        return named


def _scored_tokens(part: _Part) -> IntArray:
    start = len(part.entry.context) - part.entry.scored + part.at
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
