"""vLLM's scheduler, made to send what a step generated in one piece.

vLLM sends an object per request and step, and slices the step's log-probabilities for each: some
60 us per request and step, for K = 8. Here requests ask vLLM for no log-probabilities. The whole
table, which comes from the worker with the rest of the step's results, is attached to the first
output of the step's message (`engine.vllm.extras.StepTable`). It has all tokens, so of the other
outputs only those that end a request are sent. Written against vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsLists

from engine.vllm.extras import NO_TICKET, StepTable


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
                    message.outputs = outputs_of(
                        lists, model_runner_output.req_id_to_index, message.outputs
                    )
        return messages


def outputs_of(lists: Any, row_of: dict[str, int], outputs: Sequence[Any]) -> list[Any]:
    """What is sent instead of vLLM's outputs: one with the table, and those that end a request.

    Args:
        lists: vLLM's `LogprobsLists` of the whole step, whose ranks are tickets (`CoreSampler`).
        row_of: row of each request in the step's batch.
        outputs: of a message.
    """
    ended = [output for output in outputs if output.finish_reason is not None]
    tickets, begins = lists.sampled_token_ranks, lists.cu_num_generated_tokens
    places = [
        range(row, row + 1) if begins is None else range(begins[row], begins[row + 1])
        for row in _discarded(row_of, outputs, ended)
    ]
    if begins is not None:
        # vLLM cuts accepted drafts after a stop token.
        for output in ended:
            row = row_of.get(output.request_id)
            if row is not None:
                begin = begins[row] + len(output.new_token_ids)
                places.append(range(begin, begins[row + 1]))
    if places:
        tickets = tickets.copy()
        for place in places:
            tickets[place.start : place.stop] = NO_TICKET
    sent = ended or [outputs[0]]
    for output in sent:
        output.new_token_ids = []
    table = StepTable(lists.logprob_token_ids, lists.logprobs, tickets)
    sent[0].new_logprobs = LogprobsLists(*table)
    return sent


def _discarded(
    row_of: dict[str, int], outputs: Sequence[Any], ended: Sequence[Any]
) -> Iterable[int]:
    """Rows of the step whose tokens vLLM discards: those that have no output with tokens."""
    if len(outputs) == len(row_of) and all(output.new_token_ids for output in ended):
        return ()
    kept = {output.request_id for output in outputs if output.new_token_ids}
    return [row for name, row in row_of.items() if name not in kept]


class _StepScheduler(_WholeTables, Scheduler):
    """For steps that follow each other."""


class _AsyncStepScheduler(_WholeTables, AsyncScheduler):
    """For steps that are scheduled while the one before is running."""


def make_scheduler(vllm_config: Any, **rest: Any) -> Any:
    """The scheduler that vLLM would choose for this configuration, with whole tables."""
    overlapping = vllm_config.scheduler_config.async_scheduling
    return (_AsyncStepScheduler if overlapping else _StepScheduler)(vllm_config, **rest)
