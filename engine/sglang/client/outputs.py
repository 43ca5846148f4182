"""What SGLang's scheduler process sends becomes chunks, tables and ends for the readers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.errors import EngineError
from asyncrl.engine.remote.client.inbox import Inbox, Scored
from asyncrl.engine.remote.client.meter import Meter
from asyncrl.engine.remote.client.responses import Response, Responses
from asyncrl.engine.remote.extras import StepTable
from asyncrl.engine.sglang import messages


class OutputProcessor:
    """Hands what comes for a request to the inbox announced for it.

    Args:
        responses: of the requests that generate; the others are scored.
        meter: gets the gauges.
    """

    def __init__(self, responses: Responses, meter: Meter) -> None:
        self.responses = responses
        self.meter = meter
        self._inboxes: dict[str, Inbox[Any]] = {}

    def __len__(self) -> int:
        return len(self._inboxes)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._inboxes

    def expect(self, request_id: str, inbox: Inbox[Any]) -> None:
        """Announce where the outputs of a request go, just before it is sent."""
        self._inboxes[request_id] = inbox

    def forget(self, request_id: str) -> Inbox[Any] | None:
        """Drop what comes of a request later; its inbox, if it was not over."""
        return self._inboxes.pop(request_id, None)

    def take(self, outputs: messages.Outputs) -> None:
        """Hand over a message; outputs of requests that were forgotten are dropped.

        Raises:
            ValueError: the bytes of a table do not have its shape.
        """
        for step in outputs.steps:
            self.responses.record(step_table(step), step.policy_version)
        for scored in outputs.scored:
            inbox = self.forget(scored.request_id)
            if inbox is not None:
                inbox.push(scored_table(scored), last=True)
        for end in outputs.ends:
            inbox = self.forget(end.request_id)
            if inbox is not None:
                self._end(inbox, end)
        self.responses.report_due()
        self._measure(outputs.gauges)

    def _end(self, inbox: Inbox[Any], end: messages.End) -> None:
        if end.error:
            inbox.put(EngineError(f"SGLang ended a request: {end.error}"))
        elif isinstance(inbox, Response) and end.reason != "abort":
            self.responses.end(inbox, end.reason, end.accepted)
        elif end.reason != "abort":
            inbox.put(EngineError("SGLang ended a request without its scores"))
        else:
            inbox.put(None)  # interrupted: what it has drawn came before

    def _measure(self, gauges: messages.Gauges) -> None:
        meter = self.meter
        meter.steps, meter.drafted, meter.accepted = gauges.steps, gauges.drafted, gauges.accepted
        meter.prefix_asked, meter.prefix_found = gauges.prefix_asked, gauges.prefix_found
        meter.loaded(gauges.running, gauges.waiting, gauges.kv_used)


def step_table(step: messages.Step) -> StepTable:
    """The table of some steps. Raises ValueError as `take`."""
    return StepTable(
        *_table(step.ids, step.logprobs, step.width, count := len(step.tickets) // 8),
        np.frombuffer(step.tickets, "<i8", count),
    )


def scored_table(scored: messages.Scored) -> Scored:
    """The table of a scored request. Raises ValueError as `take`."""
    count = len(scored.ids) // (4 * scored.width)
    ids, logprobs = _table(scored.ids, scored.logprobs, scored.width, count)
    return Scored(ids, logprobs, scored.policy_version)


def _table(
    ids: bytes, logprobs: bytes, width: int, count: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """`[count, width]` each."""
    if not len(ids) == len(logprobs) == 4 * count * width:
        raise ValueError(
            f"{len(ids)} and {len(logprobs)} bytes for two tables of {count} rows of {width}"
        )
    shape = count, width
    return (
        np.frombuffer(ids, "<i4").reshape(shape).view(np.int32),
        np.frombuffer(logprobs, "<f4").reshape(shape).view(np.float32),
    )
