"""Prompt log-probabilities under the distribution that is sampled from.

vLLM computes `prompt_logprobs` from raw logits whatever `logprobs_mode` says: temperature and top-p
are left out (stated in `GPUModelRunner._get_prompt_logprobs_dict`, 0.32.0). `ScoresAsSampled`
wraps that one method of the model runner and puts them in, per request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ScoresAsSampled:
    """Wraps a model runner's prompt scoring."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._original: Any = None

    def install(self) -> None:
        """Replace the method on this runner."""
        self._original = self._runner._get_prompt_logprobs_dict  # noqa: SLF001
        self._runner._get_prompt_logprobs_dict = self.compute  # noqa: SLF001

    def compute(self, hidden_states: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        """As the original; one request after the other, each with its own sampling parameters."""
        runner = self._runner
        pending: dict[str, int] = runner.num_prompt_logprobs
        if not pending:
            return {}
        found: dict[str, Any] = {}
        try:
            for request_id in list(pending):
                params = runner.requests[request_id].sampling_params
                runner.num_prompt_logprobs = one = {request_id: pending[request_id]}
                with self._processed(params.temperature, params.top_p):
                    found.update(self._original(hidden_states, scheduled))
                if not one:
                    del pending[request_id]
        finally:
            runner.num_prompt_logprobs = pending
        return found

    @contextmanager
    def _processed(self, temperature: float, top_p: float) -> Iterator[None]:
        sampler = self._runner.sampler

        def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
            return processed_logprobs(logits, temperature, top_p)

        sampler.compute_logprobs = compute_logprobs  # shadows the class's static method
        try:
            yield
        finally:
            del sampler.compute_logprobs


def processed_logprobs(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """`[n, V]` log-probabilities after temperature and top-p, by vLLM's own top-p."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = logits.to(torch.float32) / temperature
    if top_p < 1.0:
        p = torch.full((logits.shape[0],), top_p, dtype=torch.float32, device=logits.device)
        logits = apply_top_k_top_p(logits, None, p)
    return logits.log_softmax(dim=-1, dtype=torch.float32)
