"""Our output processor inside `AsyncLLM`: hands each step to its consumer with its version.

vLLM's own processor merges the steps of a slow consumer, keeps only the last weight version of a
request and builds a Python object per log-probability. This one forwards each step's arrays with
the version that the core stamped on it. Written against vLLM 0.32.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput

from engine.errors import EngineError
from engine.vllm.client.steps import Step, StepQueue
from rollout.trajectory import FinishReason as Reason

_REASONS: dict[Any, Reason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}
_NO_IDS = np.empty((0, 1), np.int32)
_NO_LOGPROBS = np.empty((0, 1), np.float32)


class StepProcessor(OutputProcessor):
    """Hands every request's steps to the `StepQueue` announced for it."""

    def __init__(self) -> None:
        super().__init__(None, log_stats=True)
        self._expected: dict[str, StepQueue] = {}

    def expect(self, request_id: str, queue: StepQueue) -> None:
        """Announce where the steps of a request go, just before it is added."""
        self._expected[request_id] = queue

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Add a request as the parent does, then replace its queue by the announced one."""
        super().add_request(request, *args, **kwargs)
        queue = self._expected.pop(request.external_req_id)
        self.request_states[request.request_id].queue = queue

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,  # noqa: ARG002
        iteration_stats: Any = None,  # noqa: ARG002
        weight_version: str | None = None,
    ) -> OutputProcessorOutput:
        """Forward steps; outputs of requests already aborted are dropped."""
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                continue
            if output.finish_reason is not None and output.finish_reason not in _REASONS:
                state.queue.put(EngineError(f"vLLM ended a request with {output.finish_reason}"))
            else:
                state.queue.push(_step(output, int(weight_version or 0)))
            if output.finished:
                self._finish_request(state)
        return OutputProcessorOutput(request_outputs=[], reqs_to_abort=[])


def _step(output: EngineCoreOutput, policy_version: int) -> Step:
    ids, logprobs = _NO_IDS, _NO_LOGPROBS
    if output.new_logprobs is not None:
        ids = np.array(output.new_logprobs.logprob_token_ids, np.int32)
        logprobs = np.array(output.new_logprobs.logprobs, np.float32)
    scored_ids = scored_logprobs = None
    scored = output.new_prompt_logprobs_tensors
    if scored is not None:
        scored_ids = scored.logprob_token_ids.numpy().astype(np.int32)
        scored_logprobs = scored.logprobs.numpy().astype(np.float32)
    metrics = output.spec_decode_metrics
    accepted = None
    if metrics is not None:
        accepted = sum(j * count for j, count in enumerate(metrics.histogram))
    return Step(
        tokens=np.array(output.new_token_ids, np.int32),
        logprob_ids=ids,
        logprobs=logprobs,
        policy_version=policy_version,
        finish_reason=None if output.finish_reason is None else _REASONS[output.finish_reason],
        accepted=accepted,
        scored_ids=scored_ids,
        scored_logprobs=scored_logprobs,
    )
