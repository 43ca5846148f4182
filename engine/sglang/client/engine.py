"""SGLang behind the `Engine` protocol, with the rollout cache drafting inside it."""

import asyncio
import itertools
import os
from dataclasses import replace
from typing import Any

import numpy as np

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace, to_json
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError
from asyncrl.engine.remote.client.core import Core, CoreRequest, Meter
from asyncrl.engine.remote.client.engine import RemoteEngine
from asyncrl.engine.remote.client.responses import Inbox, Response, Responses, Scored
from asyncrl.engine.remote.extras import DrafterSettings, StepTable
from asyncrl.engine.sglang.client.process import SglangFolder, SglangProcess, environment_of
from asyncrl.engine.sglang.config import path_of
from asyncrl.engine.sglang.messages import (
    AddRequest,
    Answer,
    Call,
    End,
    EndRequests,
    Outputs,
    Ready,
    ServerSettings,
    SglangWorker,
    Step,
    ToClient,
    WorkerSettings,
)
from asyncrl.engine.sglang.messages import Scored as ScoredTable
from asyncrl.rollout.trajectory import FloatArray, IntArray

_ID_LENGTH = 16
"""Length of all request ids: SGLang's abort takes every request whose id begins with the given one
(`managers/scheduler.py` of sglang 0.5.23, `abort_request`), so none may begin with another."""


class SglangCore(Core):
    """The calls to SGLang, and what its scheduler process sends."""

    process: SglangProcess

    def __init__(self, process: SglangProcess, chunk_tokens: int) -> None:
        super().__init__(process)
        self.responses, self.meter = Responses(chunk_tokens), Meter()
        self.vocab_size = self.pid = 0
        self._inboxes: dict[str, Inbox[Any]] = {}
        """Inboxes by id, of requests that have not ended."""
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    @property
    def unfinished(self) -> int:
        """Number of submitted requests that have not ended."""
        return len(self._inboxes)

    def take(self, message: ToClient) -> None:
        """Process a message of the scheduler process. Raises ValueError if it is malformed."""
        if isinstance(message, Outputs):
            self._take_outputs(message)
        elif isinstance(message, Answer):
            answer = self._answers.pop(message.number, None)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif not self._ready.done():
            self._ready.set_result(message)

    def _take_outputs(self, outputs: Outputs) -> None:
        for step in outputs.steps:
            count = len(step.tickets) // 8
            ids, logprobs = _table(step, count)
            tickets = np.frombuffer(step.tickets, "<i8", count)
            self.responses.record(StepTable(ids, logprobs, tickets), step.policy_version)
        for scored in outputs.scored:
            inbox = self._inboxes.pop(scored.request_id, None)
            if inbox is not None:
                count = len(scored.ids) // (4 * scored.width)
                ids, logprobs = _table(scored, count)
                inbox.push(Scored(ids, logprobs, scored.policy_version), last=True)
        for end in outputs.ends:
            inbox = self._inboxes.pop(end.request_id, None)
            if inbox is not None:
                self._end(inbox, end)
        self.responses.report_due()
        meter, gauges = self.meter, outputs.gauges
        meter.steps, meter.drafted, meter.accepted = gauges.steps, gauges.drafted, gauges.accepted
        meter.prefix_asked, meter.prefix_found = gauges.prefix_asked, gauges.prefix_found
        meter.loaded(gauges.running, gauges.waiting, gauges.kv_used)

    def _end(self, inbox: Inbox[Any], end: End) -> None:
        if end.error:
            inbox.put(EngineError(f"SGLang ended a request: {end.error}"))
        elif end.reason == "abort":
            inbox.put(None)  # interrupted: what it has drawn came before
        elif isinstance(inbox, Response):
            self.responses.end(inbox, end.reason, end.accepted)
        else:
            inbox.put(EngineError("SGLang ended a request without its scores"))

    async def ready(self, limit: float) -> None:
        """Wait until the worker accepts requests, or raise EngineError."""
        ready = await self.process.ask(self._ready, "start", limit=limit)
        self.vocab_size, self.pid = ready.vocab_size, ready.pid

    async def submit(self, request_id: str, inbox: Inbox[Any], request: CoreRequest) -> None:
        """Send a request that is answered to `inbox`. The id must never have been used."""
        self.process.check()
        sent_id = _sent(request_id)
        self._inboxes[sent_id] = inbox
        self.meter.busy()
        extra = replace(request.extra, ticket=inbox.ticket)
        self.process.send(
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

    async def abort(self, request_ids: list[str]) -> None:
        """End requests and drop their later results; ended ones are ignored."""
        ended = []
        for sent_id in map(_sent, request_ids):
            inbox = self._inboxes.pop(sent_id, None)
            if inbox is not None:
                inbox.put(None)
                ended.append(sent_id)
        if ended and self.process.ended is None:
            self.process.send(EndRequests(ended))

    async def interrupt(self, request_id: str) -> None:
        """End a request, which reports what it has drawn and then its end. Idempotent."""
        if _sent(request_id) in self._inboxes:
            self.process.send(EndRequests([_sent(request_id)]))

    async def pause(self) -> None:
        """Stop, and return when all steps have been received; requests keep their state."""
        # The last steps came before the answer, by the same socket.
        await self._call(None, "pause", SglangWorker.asyncrl_pause)
        self.meter.idle()

    async def resume(self) -> None:
        """Resume drawing."""
        await self._call(None, "resume", SglangWorker.asyncrl_resume)

    async def _call_by_name(
        self, limit: float | None, what: str, method: str, arguments: list[Any]
    ) -> list[Any]:
        number = next(self._numbers)
        waiting = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self.process.send(Call(number, method, arguments))
            answer = await self.process.ask(waiting, what, limit=limit)
        finally:
            self._answers.pop(number, None)
        if answer.error:
            raise self.process.failure(f"SGLang could not {what}: {answer.error}")
        return [answer.result]


def _sent(request_id: str) -> str:
    if len(request_id) > _ID_LENGTH:
        raise EngineError(f"request id {request_id!r} has more than {_ID_LENGTH} characters")
    return request_id.rjust(_ID_LENGTH, ".")


def _table(sent: Step | ScoredTable, count: int) -> tuple[IntArray, FloatArray]:
    shape, nbytes = (count, sent.width), 4 * count * sent.width
    if not len(sent.ids) == len(sent.logprobs) == nbytes:
        raise ValueError(
            f"tables of {count} rows of {sent.width} have {len(sent.ids)} and "
            f"{len(sent.logprobs)} bytes, not {nbytes}"
        )
    ids, logprobs = np.frombuffer(sent.ids, "<i4"), np.frombuffer(sent.logprobs, "<f4")
    return ids.reshape(shape).view(np.int32), logprobs.reshape(shape).view(np.float32)


_HEADROOM = 16
"""Tokens of a request that SGLang keeps free (6), the one drawn after a scored text, and spares."""
_MAX_STEP_TOKENS = 4096
"""Most tokens of a step that drafts. SGLang does not limit it; more never pays."""


def _drafts(cache_config: CacheConfig) -> int:
    return cache_config.draft_tokens if cache_config.enabled else 0


def server_settings(
    config: EngineConfig,
    model_path: str,
    cache_config: CacheConfig,
    seed: int,
    folder: SglangFolder,
) -> ServerSettings:
    """Return the settings from which SGLang's arguments are made."""
    drafts = _drafts(cache_config)
    return ServerSettings(
        folder=str(folder.path),
        model_path=model_path,
        seed=seed,
        # Requests are held to our limit.
        max_model_len=config.max_model_len + drafts + _HEADROOM,
        draft_tokens=drafts,
        config=config.model_dump(mode="json"),
    )


def worker_settings(
    config: EngineConfig, cache_config: CacheConfig, place: CachePlace, folder: SglangFolder
) -> WorkerSettings:
    """Return the settings of our part of the scheduler process."""
    ours = config.sglang
    drafting = DrafterSettings(
        cache=cache_config.model_dump(mode="json"),
        place=to_json(place),
        fixed_step_tokens=ours.max_step_tokens,
        max_step_tokens=max(_MAX_STEP_TOKENS, config.slots),
        logits_bytes=config.logits_bytes,
    )
    return WorkerSettings(
        requests=folder.requests,
        outputs=folder.outputs,
        parent=os.getpid(),
        top_k=config.top_k_logprobs,
        logits_bytes=config.logits_bytes,
        stage_on_device=config.weight_staging == "device",
        steps_per_message=ours.steps_per_message,
        drafting=drafting if _drafts(cache_config) else None,
    )


class SglangEngine(RemoteEngine):
    """The generator on SGLang; see `RemoteEngine`."""

    _process: SglangProcess

    def _new_process(self) -> SglangProcess:
        return SglangProcess(self._config.sglang)

    async def _start_core(self) -> SglangCore:
        config, process = self._config, self._process
        core = SglangCore(process, config.sglang.chunk_tokens)
        folder = process.open(core.take)
        worker = worker_settings(config, self._cache_config, self._place, folder)
        process.start(
            path_of(config.sglang),
            environment_of(config, folder) | worker.to_environment(),
            server_settings(config, self._model_path, self._cache_config, self._seed, folder),
        )
        limit = config.sglang.start_limit
        try:
            await core.ready(limit)
        except EngineError as error:
            raise process.start_error(self._model_path, error, limit) from error
        return core
