"""The calls to SGLang's scheduler process, and the processing of its messages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.errors import EngineError
from asyncrl.engine.remote.calls import StagingReport
from asyncrl.engine.remote.client.core import CoreRequest, Meter
from asyncrl.engine.remote.client.inbox import Inbox, Scored
from asyncrl.engine.remote.client.responses import Response, Responses
from asyncrl.engine.remote.extras import StepTable
from asyncrl.engine.sglang import messages
from asyncrl.engine.sglang.client.process import SglangProcess
from asyncrl.engine.sglang.messages import (
    AddRequest,
    Answer,
    Call,
    EndRequests,
    Outputs,
    Ready,
    SglangWorker,
    ToClient,
)
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest


class OutputProcessor:
    """Passes the results of requests to their inboxes; `responses` are those that generate."""

    def __init__(self, responses: Responses, meter: Meter) -> None:
        self.responses = responses
        self.meter = meter
        self._inboxes: dict[str, Inbox[Any]] = {}

    def __len__(self) -> int:
        return len(self._inboxes)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._inboxes

    def expect(self, request_id: str, inbox: Inbox[Any]) -> None:
        """Register the inbox of a request, just before it is sent."""
        self._inboxes[request_id] = inbox

    def forget(self, request_id: str) -> Inbox[Any] | None:
        """Drop later results of a request; return its inbox if it had not ended."""
        return self._inboxes.pop(request_id, None)

    def take(self, outputs: messages.Outputs) -> None:
        """Process a message, or raise ValueError; outputs of forgotten requests are dropped."""
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
    """Return the table of a step. Raises ValueError as `take`."""
    return StepTable(
        *_table(step.ids, step.logprobs, step.width, count := len(step.tickets) // 8),
        np.frombuffer(step.tickets, "<i8", count),
    )


def scored_table(scored: messages.Scored) -> Scored:
    """Return the table of a scored request. Raises ValueError as `take`."""
    count = len(scored.ids) // (4 * scored.width)
    ids, logprobs = _table(scored.ids, scored.logprobs, scored.width, count)
    return Scored(ids, logprobs, scored.policy_version)


def _table(
    ids: bytes, logprobs: bytes, width: int, count: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    if not len(ids) == len(logprobs) == 4 * count * width:
        raise ValueError(
            f"{len(ids)} and {len(logprobs)} bytes for two tables of {count} rows of {width}"
        )
    shape = count, width
    return (
        np.frombuffer(ids, "<i4").reshape(shape).view(np.int32),
        np.frombuffer(logprobs, "<f4").reshape(shape).view(np.float32),
    )


T = TypeVar("T")
P = ParamSpec("P")

_ID_LENGTH = 16
"""Length of all request ids: SGLang's abort takes every request whose id begins with the given one
(`managers/scheduler.py` of sglang 0.5.23, `abort_request`), so none may begin with another."""


class SglangCore:
    """The calls to SGLang; satisfies `asyncrl.engine.remote.client.core.Core`."""

    name = "SGLang"
    min_temperature = 0.01
    """Below it float32 logits overflow in the division."""

    def __init__(self, process: SglangProcess, chunk_tokens: int) -> None:
        self._process = process
        self._outputs = OutputProcessor(Responses(chunk_tokens), Meter())
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._installations = 0
        self.policy_version = 0
        self.vocab_size = 0
        self.pid = 0

    @property
    def ended(self) -> EngineError | None:
        """The error that every later call raises; None while it runs."""
        return self._process.ended

    @property
    def unfinished(self) -> int:
        """Number of submitted requests that have not ended."""
        return len(self._outputs)

    @property
    def responses(self) -> Responses:
        """The responses being generated."""
        return self._outputs.responses

    @property
    def meter(self) -> Meter:
        """Its counters since the start."""
        return self._outputs.meter

    def failure(self, what: str) -> EngineError:
        """Return an error that quotes the end of SGLang's log."""
        return self._process.failure(what)

    def fail(self, error: EngineError) -> None:
        """Refuse every later call with this error, and raise it to all waiters."""
        self._process.fail(error)

    def take(self, message: ToClient) -> None:
        """Process a message of the scheduler process. Raises ValueError if it is malformed."""
        if isinstance(message, Outputs):
            self._outputs.take(message)
        elif isinstance(message, Answer):
            answer = self._answers.pop(message.number, None)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif not self._ready.done():
            self._ready.set_result(message)

    async def ready(self, limit: float) -> None:
        """Wait until the worker accepts requests, or raise TimeoutError or EngineError (death)."""
        ready = await self._process.ask(self._ready, "start", limit=limit)
        self.vocab_size, self.pid = ready.vocab_size, ready.pid

    async def submit(self, request_id: str, inbox: Inbox[Any], request: CoreRequest) -> None:
        """Send a request that is answered to `inbox`. The id must never have been used."""
        self._process.check()
        sent_id = _sent(request_id)
        self._outputs.expect(sent_id, inbox)
        self.meter.busy()
        extra = replace(request.extra, ticket=inbox.ticket)
        self._process.send(
            AddRequest(
                request_id=sent_id,
                tokens=np.array(request.tokens, "<i4").tobytes(),
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                stop_tokens=list(request.stop_tokens),
                priority=request.priority,
                salt=self._salt(),
                extra=extra.to_plain(),
            )
        )

    def _salt(self) -> str:
        """Return a new salt: a version may come twice, from two trainers."""
        return f"version {self.policy_version}, installation {self._installations}"

    async def abort(self, request_ids: list[str]) -> None:
        """End requests and drop their later results; ended ones are ignored."""
        ended = []
        for sent_id in map(_sent, request_ids):
            inbox = self._outputs.forget(sent_id)
            if inbox is not None:
                inbox.put(None)
                ended.append(sent_id)
        if ended and self._process.ended is None:
            self._process.send(EndRequests(ended))

    async def interrupt(self, request_id: str) -> None:
        """End a request, which reports what it has drawn and then its end. Idempotent."""
        if _sent(request_id) in self._outputs:
            self._process.send(EndRequests([_sent(request_id)]))

    async def pause(self) -> None:
        """Stop, and return when all steps have been received; requests keep their state."""
        # The last steps came before the answer, by the same socket.
        await self._call("pause", SglangWorker.asyncrl_pause)
        self.meter.idle()

    async def resume(self) -> None:
        """Resume drawing."""
        await self._call("resume", SglangWorker.asyncrl_resume)

    async def begin_staging(self, manifest: WeightManifest) -> None:
        """Make the worker copy published weights; generation continues."""
        builtins = msgspec.to_builtins(manifest)
        await self._call("stage new weights", SglangWorker.asyncrl_begin_staging, builtins)

    async def staging(self) -> StagingReport:
        """Return the state of the staging begun last, over all ranks."""
        report = await self._call("stage new weights", SglangWorker.asyncrl_staging)
        return msgspec.convert(report, StagingReport)

    async def install(self, policy_version: int, limit: float) -> str:
        """Put the staged weights in place, as `Core.install`."""
        install = SglangWorker.asyncrl_install
        what = "install new weights"
        reason = await self._call_within(limit, what, install, policy_version)
        self.policy_version = policy_version
        self._installations += 1
        return reason

    async def fingerprint(self, shapes: dict[str, tuple[int, ...]]) -> Fingerprint:
        """Return the fingerprint of the weights in use, which must not change; steps continue."""
        what = "compare its weights"
        await self._call(what, SglangWorker.asyncrl_begin_fingerprint, shapes)
        while True:
            found = await self._call(what, SglangWorker.asyncrl_fingerprint)
            if found is not None:
                return msgspec.convert(found, Fingerprint)

    async def save_cache(self) -> int:
        """Write the snapshot of the cache inside SGLang; return its bytes."""
        return await self._call("save its cache", SglangWorker.asyncrl_save_cache)

    async def _call(
        self,
        what: str,
        method: Callable[Concatenate[SglangWorker, P], T],
        *args: P.args,
        **none: P.kwargs,
    ) -> T:
        """Return the result of rank 0. Raises EngineError if it failed or did not come."""
        return await self._call_within(None, what, method, *args, **none)

    async def _call_within(
        self,
        limit: float | None,
        what: str,
        method: Callable[Concatenate[SglangWorker, P], T],
        *args: P.args,
        **_none: P.kwargs,
    ) -> T:
        self._process.check()
        number = next(self._numbers)
        waiting = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.send(Call(number, method.__name__, list(args)))
            answer = await self._process.ask(waiting, what, limit=limit)
        except TimeoutError as error:
            why = f"asked to {what}, SGLang did not answer within {limit:g} s"
            raise self.failure(why) from error
        finally:
            self._answers.pop(number, None)
        if answer.error:
            raise self.failure(f"SGLang could not {what}: {answer.error}")
        result: T = answer.result
        return result


def _sent(request_id: str) -> str:
    if len(request_id) > _ID_LENGTH:
        raise EngineError(f"request id {request_id!r} has more than {_ID_LENGTH} characters")
    return request_id.rjust(_ID_LENGTH, ".")
