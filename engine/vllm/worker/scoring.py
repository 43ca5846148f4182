"""Scores given tokens and verifies kept ones inside vLLM's model runner, as tokens are sampled.

`CoreScorer` replaces `GPUModelRunner._get_prompt_logprobs_dict` (0.32.0), which computes without
temperature and truncation. The result replaces vLLM's table: a row for each reported token, with
the columns of `asyncrl.engine.remote.extras.ScoreColumns`.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.engine.remote.worker.entries import Entry
from asyncrl.engine.remote.worker.ranks import Ranks
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

    def install(self) -> None:
        """Replace the method on this runner."""
        self._runner._get_prompt_logprobs_dict = self.compute  # noqa: SLF001

    @torch.inference_mode()
    def compute(self, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        """Return vLLM's tables of requests whose prompts are complete; empty in other ranks."""
        pending: dict[str, int] = self._runner.num_prompt_logprobs
        self._scorer.forget(pending)
        if not pending:
            return {}
        rows = [
            self._row(name, k, scheduled[name])
            for name, k in pending.items()
            if name in scheduled  # not preempted in the middle of its prompt
        ]
        tables = self._scorer.score(hidden_states, rows, self._batch.policy_version)
        for name, *_ in rows:
            if name not in self._scorer.requests:
                del pending[name]
        return {name: _as_vllm(*table) for name, table in tables.items()}

    def _row(self, name: str, k: int, count: int) -> tuple[str, Entry, int, int, int, int]:
        runner = self._runner
        begin = int(runner.requests[name].num_computed_tokens)
        offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
        return name, self._batch.entry(name), k, begin, count, offset


def _as_vllm(ids: IntArray, values: FloatArray) -> Any:
    from asyncrl.engine.vllm.worker.api import LogprobsTensors

    ranks = torch.zeros(len(ids), dtype=torch.int32)
    return LogprobsTensors(torch.from_numpy(ids), torch.from_numpy(values), ranks)
