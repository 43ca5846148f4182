"""Our versions of parts of SGLang's scheduler (0.5.23), and the sockets to the generator."""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import zmq

from asyncrl.engine.remote.worker.entries import Entry
from asyncrl.engine.sglang.messages import AddRequest, End, ToClient, ToWorker
from asyncrl.engine.sglang.worker.api import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_TOKEN,
    Req,
    SamplingParams,
    ScheduleBatch,
    SchedulerOutputStreamer,
    SchedulerRequestReceiver,
    TokenizedGenerateReqInput,
)


class Link:
    """Receives requests from one address and sends outputs to another."""

    def __init__(self, requests: str, outputs: str) -> None:
        context = zmq.Context()
        self.requests: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._outputs: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        for socket in (self.requests, self._outputs):
            socket.set_hwm(0)  # a step never waits for the client
            socket.linger = 0
        self.requests.connect(requests)
        self._outputs.connect(outputs)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

    def receive(self) -> list[ToWorker]:
        """Return all messages that have come, in order. Does not wait."""
        messages: list[ToWorker] = []
        while True:
            try:
                frame = self.requests.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decoder.decode(frame))

    def send(self, message: ToClient) -> None:
        """Send a message; does not wait."""
        self._outputs.send(self._encoder.encode(message))


class PrefillRequest(Req):
    """A request that scores its last tokens, so their KV is never taken from the radix cache."""

    entry: Entry

    def _compute_max_prefix_len(self, input_len: int) -> int:
        """Limit the prefix whose KV may be found: states of scored places are needed."""
        first = len(self.entry.context) - 1 - self.entry.extra.scored
        return min(int(super()._compute_max_prefix_len(input_len)), first)


@dataclass(kw_only=True, slots=True, frozen=True)
class ClientReceiver(SchedulerRequestReceiver):
    """Receives our client's messages in place of SGLang's; the base class distributes them."""

    link: Link | None
    """None in ranks other than 0."""

    def _pull_raw_reqs(self) -> list[Any] | None:
        return None if self.link is None else self.link.receive()


class EndStreamer(SchedulerOutputStreamer):
    """Reports the ends of requests; their tokens were reported by `StepOutput.consume`."""

    __slots__ = ("report_end",)

    report_end: Callable[[Any], None]

    def stream_output(self, reqs: list[Any], return_logprob: bool, skip_req: Any = None) -> None:  # noqa: ARG002
        """Report the ends of requests after SGLang has processed a step of them."""
        for request in reqs:
            if request is not skip_req and request.finished() and not request.finished_output:
                request.finished_output = True
                self.report_end(request)


_BATCH_FIELDS = tuple(field.name for field in fields(ScheduleBatch))


@contextmanager
def isolated(batch: Any) -> Iterator[None]:
    """Restore the fields of SGLang's batch after a forward pass, which gets a copied sampling_info.

    `Scheduler._forward_isolation` (SGLang 0.5.23) does this where drafts are possible, and looks up
    the names of the batch's 100 fields in each step.
    """
    held = vars(batch)
    before = {name: held[name] for name in _BATCH_FIELDS if name in held}
    if batch.sampling_info is not None:
        batch.sampling_info = batch.sampling_info.copy_for_forward()
    try:
        yield
    finally:
        held.update(before)


def generate_input(message: AddRequest, entry: Entry) -> Any:
    """Return SGLang's request for one of ours, without sampling parameters."""
    params = SamplingParams(
        max_new_tokens=max(1, message.max_tokens),  # what a request that only scores draws is lost
        stop_token_ids=set(message.stop_tokens),
    )
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=message.request_id,
        input_text="",
        input_ids=array("q", entry.context.tolist()),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=True,
        priority=message.priority,
        extra_key=message.salt,
    )


def end_of(request: Any) -> End:
    """Return the end of a request that SGLang has finished."""
    reason, accepted = request.finished_reason, request.spec_num_correct_drafts
    if isinstance(reason, FINISH_MATCHED_TOKEN):
        return End(request.rid, "stop", accepted)
    if isinstance(reason, FINISH_LENGTH):
        return End(request.rid, "length", accepted)
    why = reason.message if isinstance(reason, FINISH_ABORT) else repr(reason.to_json())
    return End(request.rid, "abort", accepted, f"SGLang ended the request: {why}")
