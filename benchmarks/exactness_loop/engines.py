"""Engines for the loop, and one run of the loop on each."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.exactness_loop.harness import Harness
from benchmarks.exactness_loop.modes import PROMPTS, Mode
from benchmarks.exactness_loop.outcome import LoopSettings, Outcome
from cache.config import CacheConfig
from engine.config import EngineConfig
from engine.drafting.fixed_budget import FixedBudget
from engine.factory import create_engine
from engine.protocol import Engine
from engine.torch.config import TorchConfig
from engine.vllm.config import VllmConfig


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


def vllm_engine(path: str, mode: Mode) -> Engine:
    """Real vLLM, with its prefix cache on."""
    config = EngineConfig(
        kind="vllm",
        slots=mode.slots,
        max_model_len=32,
        threads=1,
        top_k_logprobs=mode.top_k,
        vllm=VllmConfig(
            kv_cache_gib=0.25,
            max_step_tokens=256,
            enable_prefix_caching=True,
            steps_per_message=2,  # with 4, responses of some six tokens are seldom cut by an update
        ),
    )
    return create_engine(config, path, cache_config=_cache_config(mode), seed=1)


ENGINES: dict[str, Callable[[str, Mode], Engine]] = {"torch": torch_engine, "vllm": vllm_engine}


def _cache_config(mode: Mode) -> CacheConfig:
    return CacheConfig(
        max_draft_tokens=mode.max_draft_tokens,
        min_match=1,
        min_probability=0.0,
        max_bytes=1 << 24,
    )


def slow_down(engine: Any, turns: int) -> None:
    """Make a step of a torch engine take this many turns of the event loop, and always draft.

    A step of this tiny model takes no longer than a message. A step of a real model takes a hundred
    times as long. Without this, messages would take longer than whole responses, and updates would
    find no sample in generation.
    """
    core = engine._core  # noqa: SLF001 - there is no other way to slow it down
    step, loop = core.step, asyncio.get_running_loop()

    def step_slowly() -> list[Any]:
        for _ in range(turns):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
        return list(step())

    core.step = step_slowly
    core._drafter.planner = FixedBudget(max_step_tokens=4096, max_draft_tokens=4)  # noqa: SLF001


async def run_on(
    engine: Engine,
    policies: Sequence[Any],
    settings: LoopSettings,
    directory: Path,
    outcome: Outcome | None = None,
) -> Outcome:
    """Run the loop on a started engine that has the first policy's weights as version 0.

    Args:
        engine: started.
        policies: see `Harness`.
        settings: how the loop is run.
        directory: for its files.
        outcome: of the run that this one resumes; None if it is the first.
    """
    weights = [policy.state_dict() for policy in policies]
    return await Harness(engine, weights, PROMPTS, settings, directory, outcome).run()


async def run(kind: str, mode: Mode, settings: LoopSettings, policies: Sequence[Any]) -> Outcome:
    """Run the loop to its last step, each run of it on a new engine ("torch" or "vllm")."""
    with tempfile.TemporaryDirectory() as path:
        policies[0].save_pretrained(path)
        outcome = Outcome()
        while outcome.next_step < settings.steps:
            engine = ENGINES[kind](path, mode)
            await engine.start()
            try:
                if kind == "torch":
                    slow_down(engine, mode.turns_per_step)
                await run_on(engine, policies, settings, Path(path), outcome)
            finally:
                await engine.close()
        return outcome
