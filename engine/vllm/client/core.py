"""The calls to vLLM's engine core: requests, pauses, weights."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from engine.config import EngineConfig
from engine.vllm.client.inbox import Inbox
from engine.vllm.client.process import CoreProcess
from engine.vllm.extras import RequestExtra
from engine.vllm.remote import RemoteWorker, StagingReport
from wire.weights.layout import Fingerprint, WeightManifest

T = TypeVar("T")
P = ParamSpec("P")

_MAX_TEMPLATES = 64
"""Kinds of requests whose parameters are kept. A run has a few."""


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """A request as vLLM takes it."""

    tokens: list[int]
    """What to continue."""
    params: dict[str, Any]
    """Arguments of vLLM's `SamplingParams`."""
    extra: RequestExtra
    """Goes with them; the ticket is not set yet."""
    priority: int
    """Lower is served first."""


class Core:
    """What vLLM can be asked.

    Args:
        process: a started vLLM.
    """

    def __init__(self, process: CoreProcess) -> None:
        self.process = process
        self.policy_version = 0
        """Of the weights that are loaded."""
        self._installations = 0
        self._templates: dict[str, Any] = {}
        """vLLM's `SamplingParams` by our arguments, without the token limit."""

    async def attach(self, config: EngineConfig) -> None:
        """Put our drawing, scoring and drafting into vLLM's worker.

        Args:
            config: of the engine.
        """
        await self._call(
            "attach to its worker",
            RemoteWorker.asyncrl_attach,
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
        from vllm.inputs.engine import tokens_input

        vllm = self.process.vllm
        vllm.processor.expect(request_id, inbox)
        vllm.meter.busy()
        prompt = tokens_input(request.tokens, cache_salt=self._salt())
        extra = replace(request.extra, ticket=inbox.ticket)
        params = self._params_of(request.params)
        params.extra_args = extra.to_extra_args()
        await vllm.llm.add_request(request_id, prompt, params, priority=request.priority)

    def _params_of(self, arguments: dict[str, Any]) -> Any:
        """VLLM's parameters of a request: a copy of those of an earlier one of its kind.

        VLLM checks what it constructs, `extra_args` above all: a fifth of what a response costs.

        Args:
            arguments: of `SamplingParams`; the token limit differs between requests.
        """
        kind = repr([(name, one) for name, one in arguments.items() if name != "max_tokens"])
        if kind not in self._templates:
            from vllm import SamplingParams

            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            # vLLM copies the parameters of a request, deeply unless it is told not to.
            self._templates[kind] = SamplingParams(**arguments, skip_clone=True)
        params = copy(self._templates[kind])
        params.max_tokens = arguments["max_tokens"]
        return params

    def _salt(self) -> str:
        """Prefix KV is shared only among requests of the same salt, so of the same weights.

        A version alone does not say which weights: another trainer may train it again.
        """
        return f"version {self.policy_version}, installation {self._installations}"

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; those already over are ignored."""
        if self.process.died.is_set():
            return
        served = self.process.vllm.processor.external_req_ids
        running = [request_id for request_id in request_ids if request_id in served]
        if running:
            await self.process.ask(self.process.vllm.llm.abort(running), "abort requests")

    async def interrupt(self, request_id: str) -> None:
        """Have the core end a request, which answers with what it has drawn and the end.

        Nothing happens if it is already over.
        """
        vllm = self.process.vllm
        running = list(vllm.processor.external_req_ids.get(request_id, ()))
        if running:
            call = vllm.llm.engine_core.abort_requests_async(running)
            await self.process.ask(call, "interrupt a request")

    async def pause(self) -> None:
        """Return when no step runs any more and all steps have come; requests stay as they are."""
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
        """Have the worker begin to copy published weights; generation continues."""
        builtins = msgspec.to_builtins(manifest)
        await self._call("stage new weights", RemoteWorker.asyncrl_begin_staging, builtins)

    async def staging(self) -> StagingReport:
        """How far the staging begun last is, in all ranks together."""
        found = await self._call("stage new weights", RemoteWorker.asyncrl_staging)
        return StagingReport.of_all([msgspec.convert(one, StagingReport) for one in found])

    async def install(self, policy_version: int) -> str:
        """Put the staged weights in place and stamp what is drawn from now on; only while paused.

        Returns:
            Why vLLM had to load them in the pause (`RemoteWorker.asyncrl_install`), or "".
        """
        install = RemoteWorker.asyncrl_install
        reasons = await self._call("install new weights", install, policy_version)
        version = self.process.vllm.llm.update_weight_version(str(policy_version))
        await self.process.ask(version, "set its weight version")
        self.policy_version = policy_version
        self._installations += 1
        return next((reason for reason in reasons if reason), "")

    async def fingerprint(self, shapes: dict[str, tuple[int, ...]]) -> Fingerprint:
        """Of the weights in use, by names and shapes of the HF state dict.

        vLLM generates meanwhile. The weights must stay.
        """
        what = "compare its weights"
        await self._call(what, RemoteWorker.asyncrl_begin_fingerprint, shapes)
        while True:
            found, *_ = await self._call(what, RemoteWorker.asyncrl_fingerprint)
            if found is not None:  # each rank gives the one of the whole model
                return msgspec.convert(found, Fingerprint)

    async def save_cache(self) -> int:
        """Write the snapshot of the cache inside the core; returns its bytes."""
        return sum(await self._call("save its cache", RemoteWorker.asyncrl_save_cache))

    async def _call(
        self,
        what: str,
        method: Callable[Concatenate[RemoteWorker, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Call a method of the worker extension; one result for each worker."""
        llm = self.process.vllm.llm
        call = llm.collective_rpc(method.__name__, args=args, kwargs=kwargs)
        return await self.process.ask(call, what)
