"""The two sides: a generator as in a run, and vLLM alone with a processor that does nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.vllm.client.engine import VllmEngine
from asyncrl.engine.vllm.client.process import prepare, process_log, shut_down
from asyncrl.engine.vllm.config import VllmConfig
from asyncrl.generator.sample_runner import SampleGenerator
from asyncrl.generator.sample_state import SampleGeneration
from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages.data import encode_tokens
from asyncrl.wire.messages.to_generator import PromptPayload
from benchmarks.harness import cpu_seconds
from benchmarks.vllm_host.clocks import OURS, PLAIN

PROMPT = 16
"""Tokens."""
PROMPTS = 32


@dataclass(frozen=True)
class Spent:
    row_steps: int
    """Tokens of all responses."""
    wall: float
    client: float
    """CPU seconds of the generator's event loop."""
    core: float
    """CPU seconds of vLLM's core process, all threads."""
    hooks: dict[str, float]
    """CPU seconds of functions inside the core process (`timed_worker`)."""


class Side(Protocol):
    async def generate(self, rows: int, length: int, top_k: int) -> None:
        """Generate `rows` responses of `length` tokens, all at once."""

    def core_pid(self) -> int:
        """Of vLLM's core process."""

    async def hooks(self) -> dict[str, float]:
        """Seconds since the last call."""


async def timed(side: Side, rows: int, length: int, top_k: int) -> Spent:
    """Run one round. The event loop must run nothing else."""
    await side.hooks()
    wall, client, core = time.perf_counter(), time.thread_time(), cpu_seconds(side.core_pid())
    await side.generate(rows, length, top_k)
    return Spent(
        rows * length,
        time.perf_counter() - wall,
        time.thread_time() - client,
        cpu_seconds(side.core_pid()) - core,
        await side.hooks(),
    )


def config_of(
    rows: int, length: int, top_k: int, max_prefill_tokens: int | None = None
) -> EngineConfig:
    return EngineConfig(
        kind="vllm",
        slots=rows,
        max_model_len=PROMPT + length,
        threads=1,
        top_k_logprobs=top_k,
        vllm=VllmConfig(kv_cache_gib=1.0, max_prefill_tokens=max_prefill_tokens),
    )


def prompt_of(index: int) -> list[int]:
    """Prompts of a common length; a group of responses shares one."""
    return [(7 * index + 3 * place) % 61 for place in range(PROMPT)]


class Ours:
    """The generator's engine and `SampleGenerator`, down to finished trajectories."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._llm = engine._process.vllm.llm  # noqa: SLF001
        self._round = 0

    @classmethod
    @asynccontextmanager
    async def running(
        cls, config: EngineConfig, path: str, cache: CacheConfig
    ) -> AsyncIterator[Ours]:
        """Start it with clocks around what runs in vLLM's core."""
        prepare(config, process_log("ERROR"))  # before vLLM is imported
        from asyncrl.engine.vllm.client import launch

        vars(launch)["EXTENSION_PATH"] = OURS
        engine = VllmEngine(config, path, cache_config=cache, seed=1)
        await engine.start()
        try:
            ours = cls(engine)
            await ours.attach()
            yield ours
        finally:
            await engine.close()

    async def attach(self) -> None:
        """Put the clocks around what runs in vLLM's core. Once."""
        await self._llm.collective_rpc("host_attach")

    async def generate(self, rows: int, length: int, top_k: int) -> None:
        self._round += 1
        rewards: Any = _NoRewards()
        sampling = SamplingParams(length, top_k_logprobs=top_k)
        generator = SampleGenerator(self._engine, rewards, sampling)
        prompts = [
            PromptPayload(f"p{i}", encode_tokens(np.array(prompt_of(i), np.int32)), {})
            for i in range(PROMPTS)
        ]
        samples = [
            SampleGeneration(
                SampleId(self._round, i), prompts[i % PROMPTS], seed=1000 * self._round + i
            )
            for i in range(rows)
        ]
        held = await asyncio.gather(*[generator.generate(sample) for sample in samples])
        assert all(len(one.trajectory.tokens) == length for one in held)

    def core_pid(self) -> int:
        return _pid(self._llm)

    async def hooks(self) -> dict[str, float]:
        (spent,) = await self._llm.collective_rpc("host_seconds")
        return dict(spent)


class _NoRewards:
    """Rewards cost what they cost; they are not part of this."""

    def start(self, *_: Any) -> Any:
        return asyncio.get_running_loop().create_future()


class Plain:
    """VLLM without any of our code and without log-probabilities; its outputs are thrown away."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._count = 0

    @classmethod
    @asynccontextmanager
    async def running(cls, config: EngineConfig, path: str) -> AsyncIterator[Plain]:
        """Start it with the arguments of ours."""
        prepare(config, process_log("ERROR"))
        llm = await asyncio.to_thread(_launch, config, path)
        try:
            await llm.collective_rpc("host_attach")
            yield cls(llm)
        finally:
            await shut_down(llm)

    async def generate(self, rows: int, length: int, top_k: int) -> None:
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.inputs.engine import tokens_input

        assert top_k == 0, "it has no log-probabilities"
        params = VllmSamplingParams(max_tokens=length, ignore_eos=True, detokenize=False)

        async def one(i: int) -> None:
            prompt = tokens_input(prompt_of(i % PROMPTS))
            queue = await self._llm.add_request(f"q{self._count + i}", prompt, params)
            assert await queue.get() is not None

        await asyncio.gather(*[one(i) for i in range(rows)])
        self._count += rows

    def core_pid(self) -> int:
        return _pid(self._llm)

    async def hooks(self) -> dict[str, float]:
        (spent,) = await self._llm.collective_rpc("host_seconds")
        return dict(spent)


def _pid(llm: Any) -> int:
    return int(llm.engine_core.resources.engine_manager.processes[0].pid)


def _launch(config: EngineConfig, path: str) -> Any:
    """Blocks. Off the event loop, as vLLM reads outputs from its start otherwise."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput

    from asyncrl.engine.vllm.client.launch import core_processes, engine_args

    class NullProcessor(OutputProcessor):  # type: ignore[misc]
        """Looks for the end of requests, and at nothing else."""

        def process_outputs(self, outputs: Any, *_: Any, **__: Any) -> OutputProcessorOutput:
            for output in outputs:
                if output.finish_reason is not None:
                    state = self.request_states[output.request_id]
                    self._finish_request(state)
                    state.queue.put(output)
            return OutputProcessorOutput(request_outputs=[], reqs_to_abort=[])

    given = engine_args(config, path, CacheConfig(enabled=False), 1, CachePlace())
    del given["scheduler_cls"]
    args = AsyncEngineArgs(**given | {"worker_extension_cls": PLAIN})
    with core_processes(config):
        llm = AsyncLLM.from_engine_args(args)
    llm.output_processor = NullProcessor(None, log_stats=False)
    return llm
