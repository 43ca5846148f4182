"""The statistics that vLLM's core sends with each message, added to the engine's meter."""

from __future__ import annotations

from typing import Any

from asyncrl.engine.remote.client.meter import Meter
from asyncrl.engine.vllm.client.api import StatLoggerBase


class VllmMeter(Meter):
    """What vLLM has done since its start. `logger` makes the hook that AsyncLLM calls."""

    def logger(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        """A factory for `AsyncLLM(stat_loggers=[...])`."""
        return _MeterLogger(self, vllm_config, engine_index)

    def record(self, stats: Any) -> None:
        """Add the `SchedulerStats` of a message; its `step_counter` is the number of its steps."""
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.loaded(stats.num_running_reqs, waiting, stats.kv_cache_usage)
        self.steps += stats.step_counter
        self.prefix_asked += stats.prefix_cache_stats.queries
        self.prefix_found += stats.prefix_cache_stats.hits
        drafts = stats.spec_decoding_stats
        if drafts is not None:
            self.drafted += drafts.num_draft_tokens
            self.accepted += drafts.num_accepted_tokens


class _MeterLogger(StatLoggerBase):
    """Passes AsyncLLM's statistics to a Meter."""

    def __init__(self, meter: VllmMeter, _vllm_config: Any, _engine_index: int) -> None:
        self._meter = meter

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,  # noqa: ARG002
        mm_cache_stats: Any = None,  # noqa: ARG002
        engine_idx: int = 0,  # noqa: ARG002
    ) -> None:
        """Record the statistics of one message of the core."""
        if scheduler_stats is not None:
            self._meter.record(scheduler_stats)

    def log_engine_initialized(self) -> None:
        """Do nothing: AsyncLLM calls it once at the start."""
