"""Our output processor inside `AsyncLLM`: hands each step to its readers with its version.

vLLM's own processor merges the steps of a slow consumer, keeps only the last weight version of a
request and builds a Python object per log-probability. This one takes the table of a whole step
(`asyncrl.engine.remote.extras.StepTable`) with the version that the core stamped on it. A message
has some steps of one version, and no other outputs than those of tables and of requests that end
(`asyncrl.engine.vllm.worker.scheduler`), so a step costs a compiled call for any number of
requests. Written against vLLM 0.32.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.engine.errors import EngineError
from asyncrl.engine.remote.client.inbox import Inbox, Scored
from asyncrl.engine.remote.client.responses import Response, Responses
from asyncrl.engine.remote.extras import StepTable
from asyncrl.engine.vllm.client.api import (
    EngineCoreOutput,
    FinishReason,
    OutputProcessor,
    OutputProcessorOutput,
)
from asyncrl.rollout.trajectory import FinishReason as Reason

_REASONS: dict[Any, Reason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


class StepProcessor(OutputProcessor):
    """Hands what comes for a request to the inbox announced for it.

    Args:
        responses: of the requests that generate; the others are scored.
    """

    def __init__(self, responses: Responses) -> None:
        super().__init__(None, log_stats=True)
        self.responses = responses
        self._expected: dict[str, Inbox[Any]] = {}

    def expect(self, request_id: str, inbox: Inbox[Any]) -> None:
        """Announce where the steps of a request go, just before it is added."""
        self._expected[request_id] = inbox

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Add a request as the parent does, then replace its queue by the announced inbox."""
        super().add_request(request, *args, **kwargs)
        inbox = self._expected.pop(request.external_req_id)
        self.request_states[request.request_id].queue = inbox

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,  # noqa: ARG002
        iteration_stats: Any = None,  # noqa: ARG002
        weight_version: str | None = None,
    ) -> OutputProcessorOutput:
        """Hand over a message of the core's; outputs of requests already aborted are dropped.

        Args:
            engine_core_outputs: of the message, or the next ones of it: vLLM splits long messages.
            engine_core_timestamp: unused.
            iteration_stats: unused.
            weight_version: of the weights that drew the step.

        Raises:
            EngineError: there are tokens without their table. vLLM passes it to every inbox.
        """
        version = int(weight_version or 0)
        for output in engine_core_outputs:
            if output.new_logprobs is not None:
                self.responses.record(StepTable(*output.new_logprobs[:3]), version)
            if output.new_token_ids:
                raise EngineError("vLLM sent tokens without the table of their log-probabilities")
            if output.finish_reason is not None:
                self._end(output, version)
        self.responses.report_due()
        return OutputProcessorOutput(request_outputs=[], reqs_to_abort=[])

    def _end(self, output: EngineCoreOutput, policy_version: int) -> None:
        """The last output of a request."""
        state = self.request_states.get(output.request_id)
        if state is None:
            return
        inbox, reason = state.queue, _REASONS.get(output.finish_reason)
        scored = output.new_prompt_logprobs_tensors
        if reason is None:
            inbox.put(EngineError(f"vLLM ended a request with {output.finish_reason}"))
        elif reason == "abort":
            inbox.put(None)  # interrupted: what it has drawn came before
        elif isinstance(inbox, Response):
            metrics = output.spec_decode_metrics
            accepted = None
            if metrics is not None:
                accepted = sum(j * count for j, count in enumerate(metrics.histogram))
            self.responses.end(inbox, reason, accepted)
        elif scored is not None:
            ids = scored.logprob_token_ids.numpy().astype(np.int32)
            logprobs = scored.logprobs.numpy().astype(np.float32)
            inbox.push(Scored(ids, logprobs, policy_version), last=True)
        else:
            inbox.put(None)
        self._finish_request(state)
