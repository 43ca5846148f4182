"""vLLM's scheduler, made to send the log-probabilities of a step in one piece.

vLLM slices a step's table of log-probabilities for each request, and every slice travels as arrays
of its own: some 60 us per request and step, for K = 8. Here requests ask vLLM for none, and the
whole table is attached to the first output of the step's message (`engine.vllm.extras.StepTable`).
It comes from the worker with the rest of the step's results, whatever the executor. Written against
vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists

from engine.vllm.extras import StepTable


class _WholeTables:
    """Attaches the step's table to what a scheduler of vLLM's sends."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """VLLM's messages for a step, by client."""
        parent: Any = super()
        messages = parent.update_from_output(scheduler_output, model_runner_output)
        lists = model_runner_output.logprobs
        if lists is not None:
            for message in messages.values():
                if message.outputs:
                    table = table_of(lists, model_runner_output.req_id_to_index, message.outputs)
                    message.outputs[0].new_logprobs = LogprobsLists(*table)
        return messages


def table_of(lists: Any, row_of: dict[str, int], outputs: Sequence[Any]) -> StepTable:
    """The table of a message.

    Args:
        lists: vLLM's `LogprobsLists` of the whole step.
        row_of: row of each request in the step's batch.
        outputs: of the message; vLLM does not send them in the order of the batch.
    """
    begins, counts = lists.cu_num_generated_tokens, None
    starts = [row_of.get(output.request_id, -1) for output in outputs]
    if begins is not None:
        starts = [-1 if row < 0 else begins[row] for row in starts]
        counts = [len(output.new_token_ids) for output in outputs]
    return StepTable(lists.logprob_token_ids, lists.logprobs, np.array(starts, np.int64), counts)


class _StepScheduler(_WholeTables, Scheduler):
    """For steps that follow each other."""


class _AsyncStepScheduler(_WholeTables, AsyncScheduler):
    """For steps that are scheduled while the one before is running."""


def make_scheduler(vllm_config: Any, **rest: Any) -> Any:
    """The scheduler that vLLM would choose for this configuration, with whole tables."""
    overlapping = vllm_config.scheduler_config.async_scheduling
    return (_AsyncStepScheduler if overlapping else _StepScheduler)(vllm_config, **rest)
