"""Scores given tokens and verifies kept ones inside vLLM's model runner, as tokens are sampled.

`CoreScorer` replaces `GPUModelRunner._get_prompt_logprobs_dict` (0.32.0), which computes raw
`prompt_logprobs` one request after the other, without temperature and truncation. The result
replaces vLLM's table: a row for each reported token, with the columns of
`asyncrl.engine.remote.extras.ScoreColumns`.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.remote.worker.scored import ScoredPart, ScoredRequest
from asyncrl.engine.remote.worker.scoring import Scorer
from asyncrl.engine.vllm.worker.sampling import RunnerBatch
from asyncrl.rollout.trajectory import FloatArray, IntArray


class CoreScorer:
    """Computes prompt log-probabilities for a model runner, in rank 0, within `max_bytes`."""

    def __init__(self, runner: Any, batch: RunnerBatch, ranks: Ranks, max_bytes: int) -> None:
        self._runner = runner
        self._batch = batch
        self._scorer = Scorer(
            runner.model.compute_logits,
            runner.model_config.get_vocab_size(),
            ranks,
            max_bytes,
            batch.listed,
        )
        self._requests: dict[str, ScoredRequest] = {}

    def install(self) -> None:
        """Replace the method on this runner."""
        self._runner._get_prompt_logprobs_dict = self.compute  # noqa: SLF001

    @torch.inference_mode()
    def compute(self, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        """Return vLLM's tables of requests whose prompts are complete; empty in other ranks."""
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
        self._scorer.read(hidden_states, parts)
        for request_id in done:
            del pending[request_id]
        scored = {request_id: self._requests.pop(request_id) for request_id in done}
        tables = self._scorer.tables(scored, self._batch.policy_version)
        self._requests = {name: one for name, one in self._requests.items() if name in pending}
        return {name: _as_vllm(*table) for name, table in tables.items()}

    def _part(self, request_id: str, k: int, count: int) -> tuple[ScoredPart, bool]:
        runner, entry = self._runner, self._batch.entry(request_id)
        begin = int(runner.requests[request_id].num_computed_tokens)
        row = runner.input_batch.req_id_to_index[request_id]
        if request_id not in self._requests:
            self._requests[request_id] = ScoredRequest(entry, k)
        offset = int(runner.query_start_loc.np[row])
        return self._requests[request_id].part(begin, count, offset)


def _as_vllm(ids: IntArray, values: FloatArray) -> Any:
    from asyncrl.engine.vllm.worker.api import LogprobsTensors

    ranks = torch.zeros(len(ids), dtype=torch.int32)
    return LogprobsTensors(torch.from_numpy(ids), torch.from_numpy(values), ranks)
