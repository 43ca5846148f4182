"""VllmEngine: vLLM behind the `Engine` protocol, with the rollout cache drafting inside it."""

from __future__ import annotations

import logging
import time

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.remote.client.engine import RemoteEngine
from asyncrl.engine.vllm.client.core import VllmCore
from asyncrl.engine.vllm.client.process import VllmProcess
from asyncrl.wire.records.step import EngineStats

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

    def __init__(
        self,
        config: EngineConfig,
        model_path: str,
        *,
        cache_config: CacheConfig,
        seed: int,
        place: CachePlace | None = None,
    ) -> None:
        self._process = process = VllmProcess(
            config, model_path, cache_config, seed, place or CachePlace()
        )

        async def start() -> VllmCore:
            ends = time.monotonic() + config.vllm.start_limit
            await process.start()
            core = VllmCore(process)
            await core.attach(config, max(1.0, ends - time.monotonic()))
            return core

        super().__init__(config, model_path, seed=seed, process=process, start=start)

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
