"""Counters and gauges of a running vLLM, from the statistics its core sends with each message."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class Meter:
    """What vLLM has done since its start. `logger` makes the hook that AsyncLLM calls."""

    def __init__(self) -> None:
        self.steps = 0
        self.drafted = 0
        self.accepted = 0
        self.busy_seconds = 0.0
        self.running = 0
        self.waiting = 0
        self.kv_used = 0.0
        self.prefix_asked = 0
        """Context tokens that new requests came with."""
        self.prefix_found = 0
        """Of those, tokens whose KV was found in the prefix cache."""
        self._busy_since: float | None = None

    def logger(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        """A factory for `AsyncLLM(stat_loggers=[...])`."""
        return _MeterLogger(self, vllm_config, engine_index)

    def idle(self) -> None:
        """Nothing runs from now on (paused, or the last request was aborted)."""
        self._busy_since = None

    def busy(self) -> None:
        """Something runs from now on."""
        if self._busy_since is None:
            self._busy_since = time.monotonic()

    def record(self, stats: Any) -> None:
        """Add the `SchedulerStats` of a message; its `step_counter` is the number of its steps."""
        now = time.monotonic()
        if self._busy_since is not None:
            self.busy_seconds += now - self._busy_since
        self.running = stats.num_running_reqs
        self.waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        self.kv_used = stats.kv_cache_usage
        self._busy_since = now if self.running or self.waiting else None
        self.steps += stats.step_counter
        self.prefix_asked += stats.prefix_cache_stats.queries
        self.prefix_found += stats.prefix_cache_stats.hits
        drafts = stats.spec_decoding_stats
        if drafts is not None:
            self.drafted += drafts.num_draft_tokens
            self.accepted += drafts.num_accepted_tokens


class _MeterLogger(StatLoggerBase):
    """Passes AsyncLLM's statistics to a Meter."""

    def __init__(self, meter: Meter, _vllm_config: Any, _engine_index: int) -> None:
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
