"""vLLM behind the `Engine` protocol, with the rollout cache drafting inside it."""

import asyncio
import logging
import os
import time
from collections.abc import Hashable
from copy import copy
from dataclasses import replace
from typing import Any

from asyncrl.engine.config import EngineConfig
from asyncrl.engine.remote.client.core import Core, CoreRequest
from asyncrl.engine.remote.client.engine import RemoteEngine
from asyncrl.engine.remote.client.responses import Inbox
from asyncrl.engine.vllm.client.process import VllmProcess
from asyncrl.engine.vllm.remote import ADAPTER_ID, VllmWorker, to_extra_args
from asyncrl.wire.records.step import EngineStats

_MAX_TEMPLATES = 64
"""Kinds of requests whose parameters are kept. A run has a few."""


class VllmCore(Core):
    """The calls to a started vLLM."""

    process: VllmProcess

    def __init__(self, process: VllmProcess) -> None:
        super().__init__(process)
        vllm = process.vllm
        self.responses, self.meter = vllm.processor.responses, vllm.meter
        self.vocab_size = vllm.vocab_size
        self._adapter: Any = None
        """Set if the adapter is kept apart from the model."""
        self._templates: dict[Hashable, Any] = {}
        """vLLM's `SamplingParams` by our arguments, without the token limit."""

    @property
    def unfinished(self) -> int:
        """Number of submitted requests that have not ended."""
        return int(self.process.vllm.processor.get_num_unfinished_requests())

    async def attach(self, config: EngineConfig, limit: float) -> None:
        """Put our drawing, scoring and drafting into vLLM's worker, within `limit` seconds."""
        if config.vllm.lora_rank:
            from asyncrl.engine.vllm.client.api import LoRARequest

            self._adapter = LoRARequest("policy", ADAPTER_ID, "never read")
        attach, on_device = VllmWorker.asyncrl_attach, config.weight_staging == "device"
        given = os.getpid(), config.top_k_logprobs, config.logits_bytes, on_device
        await self._call(limit, "attach to its worker", attach, *given)
        llm = self.process.vllm.llm
        await self.process.ask(llm.update_weight_version("0"), "set its weight version")
        await self.process.ask(llm.get_supported_tasks(), "name its tasks")

    async def submit(self, request_id: str, inbox: Inbox[Any], request: CoreRequest) -> None:
        """Give vLLM a request that is answered to `inbox`. The id must never have been used."""
        from asyncrl.engine.vllm.client.api import tokens_input

        vllm = self.process.vllm
        vllm.processor.expect(request_id, inbox)
        self.meter.busy()
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

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; ended ones are ignored."""
        if self.process.ended is not None:
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
        self.meter.idle()

    async def resume(self) -> None:
        """Resume drawing."""
        await self.process.ask(self.process.vllm.llm.resume_generation(), "resume")

    async def install(self, policy_version: int, limit: float) -> str:
        """Put the staged weights in place, as `Core.install`."""
        why_reloaded = await super().install(policy_version, limit)
        version = self.process.vllm.llm.update_weight_version(str(policy_version))
        await self.process.ask(version, "set its weight version")
        return why_reloaded

    async def _call_by_name(
        self, limit: float | None, what: str, method: str, arguments: list[Any]
    ) -> list[Any]:
        call = self.process.vllm.llm.collective_rpc(method, args=tuple(arguments))
        return await self.process.ask(call, what, limit=limit)


def _params(
    temperature: float, top_p: float, stop_tokens: tuple[int, ...], listed: int | None
) -> Any:
    """Return vLLM's parameters; `listed` is K of the lists of scored tokens, None to generate."""
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


_STEPS = 2000
"""The planner is still learning with fewer steps."""
_WORTH = 0.02
"""Smallest share of accepted drafts in generated tokens that justifies a drafter."""


def advice_on_drafting(stats: EngineStats) -> str:
    """Return a warning if hardly any draft was worth feeding in many steps; "" otherwise.

    A drafter of ours costs vLLM its asynchronous scheduling (decision 0033), from its start on.
    `stats` are those of an engine on a GPU, with a drafter.
    """
    tokens = stats.tokens
    share = tokens.accepted / tokens.generated if tokens.generated else 0.0
    if stats.steps < _STEPS or share >= _WORTH:
        return ""
    return (
        f"drafting did not pay: {tokens.accepted} of {tokens.generated} tokens ({share:.1%}) came "
        f"from drafts in {stats.steps} steps. vLLM schedules synchronously because of the drafter; "
        "with cache.max_draft_tokens: 0 it starts without one and schedules asynchronously"
    )


_LOG = logging.getLogger(__name__)


class VllmEngine(RemoteEngine):
    """The generator on vLLM; see `RemoteEngine`."""

    _process: VllmProcess

    def _new_process(self) -> VllmProcess:
        return VllmProcess(
            self._config, self._model_path, self._cache_config, self._seed, self._place
        )

    async def _start_core(self) -> VllmCore:
        ends = time.monotonic() + self._config.vllm.start_limit
        await self._process.start()
        core = VllmCore(self._process)
        await core.attach(self._config, max(1.0, ends - time.monotonic()))
        return core

    async def close(self) -> None:
        """End vLLM; running requests end with `finish_reason="abort"`. Idempotent."""
        self._advise()
        await super().close()

    def _advise(self) -> None:
        """Log that the drafter did not pay, if it costs vLLM its asynchronous scheduling."""
        if self._parts is None or self._process.ended is not None:
            return
        vllm_config = self._process.vllm.llm.vllm_config
        if vllm_config.speculative_config is None or vllm_config.device_config.device_type == "cpu":
            return
        advice = advice_on_drafting(self.stats())
        if advice:
            _LOG.warning(advice)
