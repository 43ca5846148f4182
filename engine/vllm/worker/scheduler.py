"""vLLM's scheduler, made to send what several steps generated in one message.

vLLM sends an object per request and step. Here the step's whole table of tokens (`StepTable`) is
attached to its first output; of the other outputs only those that end a request are sent.

Several steps share a message (`Outbox`). When it is sent depends on the tokens in it, so a cut at
the last message would reveal something about the tokens after it (docs/decisions/0011). Therefore
an interrupted response ends here: what was drawn before is sent, then its end.

Written against vLLM 0.32.0.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from asyncrl.engine.remote.extras import NO_TICKET, StepTable
from asyncrl.engine.vllm.remote import CoreSettings
from asyncrl.engine.vllm.worker.api import (
    AsyncScheduler,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    LogprobsLists,
    RequestStatus,
    Scheduler,
)

_MAX_SECONDS = 0.1
"""Longest time that a step waits for the message to be sent, when steps are slow."""


class Outbox:
    """The outputs of steps not sent yet; a message has at most `steps_per_message` steps."""

    def __init__(self, steps_per_message: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps_per_message = steps_per_message
        self._clock = clock
        self._began = 0.0
        self._outputs: dict[int, list[Any]] = {}
        self._drafts: Any = None
        self._hurried = False
        self.steps = 0
        self.due = False
        """True if a message is sent after the current step."""

    @property
    def waits(self) -> bool:
        """True if there is anything to send."""
        return self.steps > 0 or bool(self._outputs)

    def begin(self, *, urgent: bool) -> None:
        """Count a step, and decide whether a message is sent after it: always if `urgent`."""
        now = self._clock()
        if not self.steps:
            self._began = now
        self.steps += 1
        full = self.steps >= self._steps_per_message or now - self._began >= _MAX_SECONDS
        self.due = urgent or self._hurried or full

    def count_drafts(self, drafts: Any) -> Any:
        """Add vLLM's statistics of a step's drafts (None: no drafts); return the sum so far."""
        total = self._drafts
        if total is None:
            self._drafts = drafts
        elif drafts is not None:
            total.num_drafts += drafts.num_drafts
            total.num_draft_tokens += drafts.num_draft_tokens
            total.num_accepted_tokens += drafts.num_accepted_tokens
        return self._drafts

    def add_ends(self, requests: Iterable[Any]) -> None:
        """Add the ends of vLLM's aborted requests, and hurry, as readers wait for them."""
        for one in requests:
            end = EngineCoreOutput(one.request_id, [], finish_reason=FinishReason.ABORT)
            self._outputs.setdefault(one.client_index, []).append(end)
        self._hurried |= self.waits

    def add(self, messages: dict[int, Any]) -> None:
        """Add the outputs of a step, by client."""
        for client, message in messages.items():
            self._outputs.setdefault(client, []).extend(message.outputs)

    def take(self, messages: dict[int, Any]) -> dict[int, Any]:
        """Move all outputs into the messages of the last step."""
        for client, outputs in self._outputs.items():
            if client not in messages:
                messages[client] = EngineCoreOutputs()
            messages[client].outputs = outputs
        self._outputs = {}
        self._drafts, self.steps, self._hurried = None, 0, False
        return messages


class _WholeTables:
    """Makes a scheduler of vLLM's send whole tables, several steps in one message."""

    outbox: Outbox
    finished_req_ids: set[str]
    """vLLM's: ended requests that the worker does not know of yet."""

    def has_requests(self) -> bool:
        """Return True if a step is needed, if only to send what is left before a pause."""
        parent: Any = super()
        return self.outbox.waits or bool(parent.has_requests())

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """End requests from outside, as vLLM does; their ends are sent after what they have drawn.

        vLLM may call it before a step's tokens are looked at: these are discarded.
        """
        parent: Any = super()
        ended = parent.finish_requests(request_ids, finished_status)
        if finished_status == RequestStatus.FINISHED_ABORTED:
            self.outbox.add_ends(ended)
        return ended

    def make_stats(self, spec_decoding_stats: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return vLLM's statistics for a message; None if none is sent after this step."""
        parent: Any = super()
        drafts = self.outbox.count_drafts(spec_decoding_stats)
        if not self.outbox.due:
            return None
        stats = parent.make_stats(drafts, *args, **kwargs)
        if stats is not None:
            stats.step_counter = self.outbox.steps
        return stats

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Return vLLM's messages by client; none while the outbox is filling."""
        parent: Any = super()
        lists, outbox = model_runner_output.logprobs, self.outbox
        # A step that draws nothing sends what is left; readers wait for scores.
        outbox.begin(urgent=lists is None or bool(model_runner_output.prompt_logprobs_dict))
        messages = parent.update_from_output(scheduler_output, model_runner_output)
        if lists is not None:
            row_of, ended = model_runner_output.req_id_to_index, bool(self.finished_req_ids)
            for message in messages.values():
                if message.outputs:
                    message.outputs = outputs_of(lists, row_of, message.outputs, ended=ended)
        outbox.add(messages)
        return outbox.take(messages) if outbox.due else {}


def outputs_of(
    lists: Any, row_of: dict[str, int], outputs: Sequence[Any], *, ended: bool = True
) -> list[Any]:
    """Replace vLLM's outputs by one with the table, and those that end a request.

    `lists` are vLLM's `LogprobsLists` of the whole step, whose ranks are tickets (`CoreSampler`).
    `row_of` maps requests to rows of the step's batch. If not `ended`, no output ends a request.
    """
    last = [output for output in outputs if output.finish_reason is not None] if ended else []
    tickets, begins = lists.sampled_token_ranks, lists.cu_num_generated_tokens
    places = [
        range(row, row + 1) if begins is None else range(begins[row], begins[row + 1])
        for row in _discarded(row_of, outputs, last)
    ]
    if begins is not None:
        # vLLM cuts accepted drafts after a stop token.
        for output in last:
            row = row_of.get(output.request_id)
            if row is not None:
                begin = begins[row] + len(output.new_token_ids)
                places.append(range(begin, begins[row + 1]))
    if places:
        tickets = tickets.copy()
        for place in places:
            tickets[place.start : place.stop] = NO_TICKET
    sent = last or [outputs[0]]
    for output in sent:
        output.new_token_ids = []
    table = StepTable(lists.logprob_token_ids, lists.logprobs, tickets)
    sent[0].new_logprobs = LogprobsLists(*table)
    return sent


def _discarded(
    row_of: dict[str, int], outputs: Sequence[Any], last: Sequence[Any]
) -> Iterable[int]:
    """Return the step's rows whose tokens vLLM discards: they have no output with tokens."""
    if len(outputs) == len(row_of) and all(output.new_token_ids for output in last):
        return ()
    kept = {output.request_id for output in outputs if output.new_token_ids}
    return [row for name, row in row_of.items() if name not in kept]


def make_scheduler(vllm_config: Any, **rest: Any) -> Any:
    """Make the scheduler that vLLM would choose for this configuration, with our messages."""
    theirs = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = type("StepScheduler", (_WholeTables, theirs), {})(vllm_config, **rest)
    settings = CoreSettings.from_config(vllm_config.additional_config)
    scheduler.outbox = Outbox(settings.steps_per_message)
    return scheduler
