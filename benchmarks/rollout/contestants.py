"""The engines that benchmarks.rollout compares.

    plain    without any drafter: a vLLM that is able to draft is not the fastest plain one
    suffix   vLLM with its own history drafter (ArcticInference) and our plug-in's fix of sampling,
             without which vLLM 0.32.0 draws wrong tokens on a CPU
    ours     this project's default: the cache drafts, and the planner decides how much
    chain    torch only: like ours, but with one chain per row instead of a tree

All engines run at the same time, each in its own process (vLLM, SGLang) or as its own engine object
(torch). While one is timed, the others wait. The processor time that they use meanwhile is measured
(`Contestant.cpu_seconds`) and reported.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import util
from typing import Any
from unittest import mock

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.factory import create_engine
from asyncrl.engine.protocol import Engine
from benchmarks.harness import cpu_seconds, descendants

PLAIN, SUFFIX, OURS, CHAIN = "plain", "suffix", "ours", "chain"
SUFFIX_TOKENS = 16
SUFFIX_FACTOR = 2.0
"""The best setting on this workload: 1 (the default), 2, 4 and 8 gave 5.1, 5.9, 5.7 and 5.6 tokens
per step at one row. 32 tokens, a depth of 64 or another minimum probability gave nothing more."""


@dataclass
class Contestant:
    name: str
    engine: Engine
    remembers: bool
    """Whether it has a cache that epoch 1 fills."""
    suffix: bool = False
    """Whether vLLM's own `suffix` drafter is used."""
    pids: tuple[int, ...] = field(default=(), init=False)

    async def start(self) -> None:
        """Start the engine and note its processes. Raises EngineStartError."""
        before = descendants(os.getpid())
        with _suffix_arguments() if self.suffix else contextlib.nullcontext():
            await self.engine.start()
        self.pids = tuple(descendants(os.getpid()) - before)

    def cpu_seconds(self) -> float:
        """Processor time of the engine's own processes; 0 for an engine in this process."""
        return sum(cpu_seconds(pid) for pid in self.pids)


def contestants(
    kind: str, model: str, config: EngineConfig
) -> tuple[list[Contestant], dict[str, str]]:
    """The contestants that can run here, and the reasons why others cannot."""
    missing: dict[str, str] = {}
    off = CacheConfig(enabled=False)
    found = [Contestant(PLAIN, create_engine(config, model, cache_config=off, seed=0), False)]
    if kind == "vllm":
        if util.find_spec("arctic_inference") is None:
            missing["vllm suffix"] = "pip install arctic-inference==0.3.0 (builds in 80 s)"
        else:
            engine = create_engine(config, model, cache_config=off, seed=0)
            found.append(Contestant(SUFFIX, engine, True, suffix=True))
    if kind == "torch":
        chain = with_torch(config, draft_trees=False)
        engine = create_engine(chain, model, cache_config=CacheConfig(), seed=0)
        found.append(Contestant(CHAIN, engine, True))
        config = with_torch(config, draft_trees=True)
    found.append(
        Contestant(OURS, create_engine(config, model, cache_config=CacheConfig(), seed=0), True)
    )
    return found, missing


def with_torch(config: EngineConfig, **settings: Any) -> EngineConfig:
    """The configuration with other settings of the torch engine."""
    values = config.model_dump()
    values["torch"] |= settings
    return EngineConfig.model_validate(values)


@contextlib.contextmanager
def _suffix_arguments() -> Iterator[None]:
    """Start our vLLM engine with vLLM's own `suffix` method instead of our drafting."""
    from asyncrl.engine.vllm.client import launch

    plain = launch.engine_args

    def with_suffix(*given: Any) -> dict[str, Any]:
        args = plain(*given)
        return args | {
            "max_model_len": args["max_model_len"] + SUFFIX_TOKENS,
            "per_request_spec_decode_metrics": "summary",
            "speculative_config": {
                "method": "suffix",
                "num_speculative_tokens": SUFFIX_TOKENS,
                "suffix_decoding_max_spec_factor": SUFFIX_FACTOR,
            },
        }

    with mock.patch.object(launch, "engine_args", with_suffix):
        yield
