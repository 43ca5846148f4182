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
    """What vLLM can be asked; satisfies `asyncrl.engine.remote.client.core.Core`.

    Args:
        process: a started vLLM.
    """

    name = "vLLM"
    min_temperature = 0.01
    """vLLM silently raises a lower one to this."""

    def __init__(self, process: VllmProcess) -> None:
        self.process = process
        self.policy_version = 0
        """Of the weights that are loaded."""
        self._installations = 0
        self._adapter: Any = None
        """What requests name where an adapter is kept apart from the model."""
        self._templates: dict[Hashable, Any] = {}
        """vLLM's `SamplingParams` by our arguments, without the token limit."""

    @property
    def vocab_size(self) -> int:
        """Of the loaded model."""
        return self.process.vllm.vocab_size

    @property
    def ended(self) -> EngineError | None:
        """Why nothing can be asked any more; None while it runs."""
        return self.process.ended

    @property
    def unfinished(self) -> int:
        """Requests submitted whose end has not come."""
        unfinished: int = self.process.vllm.processor.get_num_unfinished_requests()
        return unfinished

    @property
    def responses(self) -> Responses:
        """The responses being generated."""
        return self.process.vllm.processor.responses

    @property
    def meter(self) -> Meter:
        """What it has done since its start."""
        return self.process.vllm.meter

    def failure(self, what: str) -> EngineError:
        """An error that quotes the end of vLLM's log."""
        return self.process.failure(what)

    def fail(self, error: EngineError) -> None:
        """Refuse every later call with this error, and tell those who wait."""
        self.process.fail(error)

    async def attach(self, config: EngineConfig, limit: float) -> None:
        """Put our drawing, scoring and drafting into vLLM's worker.

        The worker compiles what draws, and proves how it installs weights.

        Args:
            config: of the engine.
            limit: what is left of the start, in seconds.
        """
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
        """VLLM's parameters of a request: a copy of those of an earlier one of its kind.

        VLLM checks what it constructs, `extra_args` above all: a fifth of what a response costs.
        """
        listed = request.extra.top_k_logprobs if request.extra.scored else None
        kind = request.temperature, request.top_p, request.stop_tokens, listed
        if kind not in self._templates:
            if len(self._templates) >= _MAX_TEMPLATES:
                self._templates.clear()
            self._templates[kind] = _params(*kind)
        params = copy(self._templates[kind])
        # vLLM must draw a token even if it only scores; it is thrown away.
        params.max_tokens = max(1, request.max_tokens)
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
        await self._call("stage new weights", VllmWorker.asyncrl_begin_staging, builtins)

    async def staging(self) -> StagingReport:
        """How far the staging begun last is, in all ranks together."""
        found = await self._call("stage new weights", VllmWorker.asyncrl_staging)
        return StagingReport.of_all([msgspec.convert(one, StagingReport) for one in found])

    async def install(self, policy_version: int, limit: float) -> str:
        """Put the staged weights in place and stamp what is drawn from now on; only while paused.

        Args:
            policy_version: that is staged.
            limit: of the wait for it, in seconds.

        Returns:
            Why vLLM had to load them in the pause (`RemoteWorker.asyncrl_install`), or "".
        """
        install = VllmWorker.asyncrl_install
        what = "install new weights"
        reasons = await self._call_within(limit, what, install, policy_version)
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
        await self._call(what, VllmWorker.asyncrl_begin_fingerprint, shapes)
        while True:
            found, *_ = await self._call(what, VllmWorker.asyncrl_fingerprint)
            if found is not None:  # each rank gives the one of the whole model
                return msgspec.convert(found, Fingerprint)

    async def save_cache(self) -> int:
        """Write the snapshot of the cache inside the core; returns its bytes."""
        return sum(await self._call("save its cache", VllmWorker.asyncrl_save_cache))

    async def _call(
        self,
        what: str,
        method: Callable[Concatenate[VllmWorker, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Call a method of the worker extension; one result for each worker."""
        return await self._call_within(None, what, method, *args, **kwargs)

    async def _call_within(
        self,
        limit: float | None,
        what: str,
        method: Callable[Concatenate[VllmWorker, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """As `_call`, with a limit of its own in seconds; None: that of calls."""
        llm = self.process.vllm.llm
        call = llm.collective_rpc(method.__name__, args=args, kwargs=kwargs)
        return await self.process.ask(call, what, limit=limit)


def _params(
    temperature: float, top_p: float, stop_tokens: tuple[int, ...], listed: int | None
) -> Any:
    """VLLM's parameters for a kind of requests, without the token limit.

    Args:
        temperature: of sampling.
        top_p: of sampling.
        stop_tokens: that end a response.
        listed: K of the lists of scored tokens; None: it generates. Our scorer fills them, and our
            sampler those of drawn tokens, for which vLLM would slice the step's table.
    """
    from asyncrl.engine.vllm.client.api import SamplingParams

    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        stop_token_ids=list(stop_tokens),
        prompt_logprobs=listed,
        ignore_eos=True,  # only our stop tokens end a response; what the model's files say does not
        detokenize=False,
        skip_clone=True,  # vLLM copies the parameters of a request, deeply unless it is told not to
    )
