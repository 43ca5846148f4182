"""The calls to vLLM's engine core: requests, pauses, weights."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError
from asyncrl.engine.remote.calls import StagingReport
from asyncrl.engine.remote.client.core import CoreRequest, Meter
from asyncrl.engine.remote.client.inbox import Inbox
from asyncrl.engine.remote.client.responses import Responses
from asyncrl.engine.vllm.client.process import VllmProcess
from asyncrl.engine.vllm.extras import to_extra_args
from asyncrl.engine.vllm.remote import ADAPTER_ID, VllmWorker
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest

T = TypeVar("T")
P = ParamSpec("P")

_MAX_TEMPLATES = 64
"""Kinds of requests whose parameters are kept. A run has a few."""


class VllmCore:
    """The calls to a started vLLM; satisfies `asyncrl.engine.remote.client.core.Core`."""

    name = "vLLM"
    min_temperature = 0.01
    """vLLM silently raises a lower temperature to this."""

    def __init__(self, process: VllmProcess) -> None:
        self.process = process
        self.policy_version = 0
        self._installations = 0
        self._adapter: Any = None
        """Set if the adapter is kept apart from the model."""
        self._templates: dict[Hashable, Any] = {}
        """vLLM's `SamplingParams` by our arguments, without the token limit."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the loaded model."""
        return self.process.vllm.vocab_size

    @property
    def ended(self) -> EngineError | None:
        """The error that every later call raises; None while it runs."""
        return self.process.ended

    @property
    def unfinished(self) -> int:
        """Number of submitted requests that have not ended."""
        unfinished: int = self.process.vllm.processor.get_num_unfinished_requests()
        return unfinished

    @property
    def responses(self) -> Responses:
        """The responses being generated."""
        return self.process.vllm.processor.responses

    @property
    def meter(self) -> Meter:
        """Its counters since the start."""
        return self.process.vllm.meter

    def failure(self, what: str) -> EngineError:
        """Return an error that quotes the end of vLLM's log."""
        return self.process.failure(what)

    def fail(self, error: EngineError) -> None:
        """Refuse every later call with this error, and raise it to all waiters."""
        self.process.fail(error)

    async def attach(self, config: EngineConfig, limit: float) -> None:
        """Put our drawing, scoring and drafting into vLLM's worker, within `limit` seconds."""
        if config.vllm.lora_rank:
            from asyncrl.engine.vllm.client.api import LoRARequest

            self._adapter = LoRARequest("policy", ADAPTER_ID, "never read")
        await self._call_within(
            limit,
            "attach to its worker",
            VllmWorker.asyncrl_attach,
            os.getpid(),
            config.top_k_logprobs,
            config.logits_bytes,
            config.weight_staging == "device",
        )
        llm = self.process.vllm.llm
        await self.process.ask(llm.update_weight_version("0"), "set its weight version")
        await self.process.ask(llm.get_supported_tasks(), "name its tasks")

    async def submit(self, request_id: str, inbox: Inbox[Any], request: CoreRequest) -> None:
        """Give vLLM a request that is answered to `inbox`. The id must never have been used."""
        from asyncrl.engine.vllm.client.api import tokens_input

        vllm = self.process.vllm
        vllm.processor.expect(request_id, inbox)
        vllm.meter.busy()
        prompt = tokens_input(request.tokens, cache_salt=self._salt())
        extra = replace(request.extra, ticket=inbox.ticket)
        params = self._params_of(request)
        params.extra_args = to_extra_args(extra)
        await vllm.llm.add_request(
            request_id, prompt, params, priority=request.priority, lora_request=self._adapter
        )

    def _params_of(self, request: CoreRequest) -> Any:
        """Return a copy of vLLM's parameters of this kind of request: checking them is slow."""
        listed = request.extra.top_k_logprobs if request.extra.scored else None
        kind = request.temperature, request.top_p, request.stop_tokens, listed
        if kind not in self._templates:
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            self._templates[kind] = _params(*kind)
        params = copy(self._templates[kind])
        # vLLM must draw a token even if it only scores; it is dropped.
        params.max_tokens = max(1, request.max_tokens)
        return params

    def _salt(self) -> str:
        """Return a new salt: a version may come twice, from two trainers."""
        return f"version {self.policy_version}, installation {self._installations}"

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; ended ones are ignored."""
        if self.process.died.is_set():
            return
        served = self.process.vllm.processor.external_req_ids
        running = [request_id for request_id in request_ids if request_id in served]
        if running:
            await self.process.ask(self.process.vllm.llm.abort(running), "abort requests")

    async def interrupt(self, request_id: str) -> None:
        """End a request, which reports what it has drawn and then its end. Idempotent."""
        vllm = self.process.vllm
        running = list(vllm.processor.external_req_ids.get(request_id, ()))
        if running:
            call = vllm.llm.engine_core.abort_requests_async(running)
            await self.process.ask(call, "interrupt a request")

    async def pause(self) -> None:
        """Stop, and return when all steps have been received; requests keep their state."""
        client = self.process.vllm.llm.engine_core
        call = client.pause_scheduler_async(mode="keep", clear_cache=False)
        await self.process.ask(call, "pause")
        # `AsyncLLM.pause_generation` sleeps for 20 ms here, at every update. The last steps came
        # before the answer, by the same socket: the output task only has to take them.
        for _ in range(3 + client.outputs_queue.qsize()):
            await asyncio.sleep(0)
        self.process.vllm.meter.idle()

    async def resume(self) -> None:
        """Resume drawing."""
        await self.process.ask(self.process.vllm.llm.resume_generation(), "resume")

    async def begin_staging(self, manifest: WeightManifest) -> None:
        """Make the worker copy published weights; generation continues."""
        builtins = msgspec.to_builtins(manifest)
        await self._call("stage new weights", VllmWorker.asyncrl_begin_staging, builtins)

    async def staging(self) -> StagingReport:
        """Return the state of the staging begun last, over all ranks."""
        found = await self._call("stage new weights", VllmWorker.asyncrl_staging)
        return StagingReport.of_all([msgspec.convert(one, StagingReport) for one in found])

    async def install(self, policy_version: int, limit: float) -> str:
        """Put the staged weights in place, as `Core.install`."""
        install = VllmWorker.asyncrl_install
        what = "install new weights"
        reasons = await self._call_within(limit, what, install, policy_version)
        version = self.process.vllm.llm.update_weight_version(str(policy_version))
        await self.process.ask(version, "set its weight version")
        self.policy_version = policy_version
        self._installations += 1
        return next((reason for reason in reasons if reason), "")

    async def fingerprint(self, shapes: dict[str, tuple[int, ...]]) -> Fingerprint:
        """Return the fingerprint of the weights in use, which must not change; steps continue."""
        what = "compare its weights"
        await self._call(what, VllmWorker.asyncrl_begin_fingerprint, shapes)
        while True:
            found, *_ = await self._call(what, VllmWorker.asyncrl_fingerprint)
            if found is not None:  # each rank returns that of the whole model
                return msgspec.convert(found, Fingerprint)

    async def save_cache(self) -> int:
        """Write the snapshot of the cache inside the core; return its bytes."""
        return sum(await self._call("save its cache", VllmWorker.asyncrl_save_cache))

    async def _call(
        self,
        what: str,
        method: Callable[Concatenate[VllmWorker, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Return one result for each worker."""
        return await self._call_within(None, what, method, *args, **kwargs)

    async def _call_within(
        self,
        limit: float | None,
        what: str,
        method: Callable[Concatenate[VllmWorker, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        llm = self.process.vllm.llm
        call = llm.collective_rpc(method.__name__, args=args, kwargs=kwargs)
        return await self.process.ask(call, what, limit=limit)


def _params(
    temperature: float, top_p: float, stop_tokens: tuple[int, ...], listed: int | None
) -> Any:
    """Return vLLM's parameters for a kind of requests, without the token limit.

    `listed` is K of the lists of scored tokens; None: it generates. We fill all lists ourselves.
    """
    from asyncrl.engine.vllm.client.api import SamplingParams

    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        stop_token_ids=list(stop_tokens),
        prompt_logprobs=listed,
        ignore_eos=True,  # only our stop tokens end a response, not those of the model's files
        detokenize=False,
        skip_clone=True,  # otherwise vLLM copies the parameters of a request deeply
    )
