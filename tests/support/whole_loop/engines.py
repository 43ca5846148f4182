"""Engines for the loop, and one run of the loop on each."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.factory import create_engine
from asyncrl.engine.protocol import Engine
from asyncrl.engine.remote.worker.drafting import FixedBudget
from asyncrl.engine.sglang.config import SglangConfig
from asyncrl.engine.torch.config import TorchConfig
from asyncrl.engine.vllm.config import VllmConfig
from asyncrl.wire.weights.writer import published
from benchmarks.harness import sglang_python
from whole_loop.harness import Harness
from whole_loop.modes import PROMPTS, Mode
from whole_loop.outcome import LoopSettings, Outcome

_POLL_SECONDS = 0.005
_RESET_SECONDS = 60.0
"""Longest wait for the requests of a killed run to end."""


def torch_engine(path: str, mode: Mode) -> Engine:
    """The embedded engine. Drafts do not depend on the clock after `slow_down` was called on it."""
    config = EngineConfig(
        kind="torch",
        slots=mode.slots,
        max_model_len=16,
        device="cpu",
        dtype="float32",
        threads=1,
        top_k_logprobs=mode.top_k,
        torch=TorchConfig(max_step_tokens=4096),
    )
    return create_engine(config, path, cache_config=_cache_config(mode), seed=1)


class _Vllm(VllmConfig):
    steps_per_message: ClassVar[int] = 2  # with 4, responses of six tokens are seldom cut


class _Sglang(SglangConfig):
    steps_per_message: ClassVar[int] = 2


def vllm_engine(path: str, mode: Mode) -> Engine:
    """Real vLLM, with its prefix cache on."""
    config = EngineConfig(
        kind="vllm",
        slots=mode.slots,
        max_model_len=32,
        threads=1,
        top_k_logprobs=mode.top_k,
        vllm=_Vllm(kv_cache_gib=0.25, max_step_tokens=256, enable_prefix_caching=True),
    )
    return create_engine(config, path, cache_config=_cache_config(mode), seed=1)


def sglang_engine(path: str, mode: Mode) -> Engine:
    """Real SGLang, with its radix cache on."""
    config = EngineConfig(
        kind="sglang",
        slots=mode.slots,
        max_model_len=32,
        threads=1,
        top_k_logprobs=mode.top_k,
        sglang=_Sglang(python=sglang_python(), kv_cache_gib=0.05, max_step_tokens=256),
    )
    return create_engine(config, path, cache_config=_cache_config(mode), seed=1)


ENGINES: dict[str, Callable[[str, Mode], Engine]] = {
    "torch": torch_engine,
    "vllm": vllm_engine,
    "sglang": sglang_engine,
}


def _cache_config(mode: Mode) -> CacheConfig:
    return CacheConfig(
        max_draft_tokens=mode.max_draft_tokens, min_match=1, min_probability=0.0, max_bytes=1 << 24
    )


def slow_down(engine: Any, turns: int) -> None:
    """Make a step of a torch engine take this many turns of the event loop, and always draft.

    A step of this tiny model takes no longer than a message. A step of a real model takes a hundred
    times as long. Without this, messages would take longer than whole responses, and updates would
    find no sample in generation.
    """
    core = engine._core
    step, loop = core.step, asyncio.get_running_loop()

    async def wait() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    def step_slowly() -> list[Any]:
        asyncio.run_coroutine_threadsafe(wait(), loop).result()
        return list(step())

    core.step = step_slowly
    core._drafter.planner = FixedBudget(max_step_tokens=4096, max_draft_tokens=4)


async def run_on(
    engines: Mapping[str, Engine],
    policies: Sequence[Any],
    settings: LoopSettings,
    directory: Path,
    outcome: Outcome | None = None,
) -> Outcome:
    """Run the loop on started engines that have the first policy's weights as version 0."""
    weights = [policy.state_dict() for policy in policies]
    return await Harness(engines, weights, PROMPTS, settings, directory, outcome).run()


async def run(
    kinds: Sequence[str], mode: Mode, settings: LoopSettings, policies: Sequence[Any]
) -> Outcome:
    """Run the loop to its last step, with one generator on each of these engines (`ENGINES`).

    Each run of it has new torch engines. vLLM and SGLang are started once, and each run begins
    with new installations of its weights.
    """
    with tempfile.TemporaryDirectory() as path:
        policies[0].save_pretrained(path)
        outcome = Outcome()
        remote = {kind: ENGINES[kind](path, mode) for kind in kinds if kind != "torch"}
        try:
            for engine in remote.values():
                await engine.start()
            while outcome.next_step < settings.steps:
                await run_once(kinds, remote, mode, settings, policies, Path(path), outcome)
        finally:
            for engine in remote.values():
                await engine.close()
        return outcome


async def run_once(
    kinds: Sequence[str],
    remote: Mapping[str, Engine],
    mode: Mode,
    settings: LoopSettings,
    policies: Sequence[Any],
    path: Path,
    outcome: Outcome,
) -> Outcome:
    """One run of the loop, which ends with its last step or is killed.

    A fleet begins with all of its engines. After a kill one of them is missing, and after the next
    one all are there again. So what the missing one had written ahead is certainly verified and
    continued by others.
    """
    if "torch" not in kinds:
        settings = replace(settings, slots=mode.remote_slots)
    engines = {
        kind: remote[kind] if kind in remote else ENGINES[kind](str(path), mode)
        for kind in kinds
        if kind != missing(kinds, outcome.resumed)
    }
    if list(kinds) == ["torch"]:
        engines |= {
            f"torch{number}": ENGINES["torch"](str(path), mode)
            for number in range(1, mode.generators)
        }
    own = [engine for name, engine in engines.items() if name not in remote]
    for engine in remote.values():
        await _reset(engine, policies[0])
    try:
        for engine in own:
            await engine.start()
            slow_down(engine, 1 if remote else mode.turns_per_step)
        return await run_on(engines, policies, settings, path, outcome)
    finally:
        for engine in own:
            await engine.close()


def missing(kinds: Sequence[str], resumed: int) -> str | None:
    """The engine that is not there in this run of a fleet."""
    if len(kinds) == 1 or resumed % 2 == 0:
        return None
    return kinds[resumed // 2 % len(kinds)]


async def _reset(engine: Engine, policy: Any) -> None:
    """Have an engine begin again with these weights, as version 0."""
    async with asyncio.timeout(_RESET_SECONDS):
        # A killed run's requests are ending.
        while (stats := engine.stats()).running + stats.waiting:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
    with published(policy.state_dict().items(), 0) as manifest:
        await engine.stage_weights(manifest)
    await engine.install_weights(0)
