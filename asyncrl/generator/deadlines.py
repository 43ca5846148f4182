"""The optional, biased deadline of samples: `scheduler.sample_deadline_seconds`."""

from __future__ import annotations

import time

from asyncrl.generator.sample_table import Samples
from asyncrl.scheduler.config import SchedulerConfig


class Deadlines:
    """Ends samples whose generation takes too long, with the tokens that they have.

    A sample's time runs from its first token. Verification has no deadline: none of its tokens
    would be usable.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def end_overdue(self) -> None:
        """Interrupt samples past the deadline; they end with reason `deadline`."""
        now = time.monotonic()
        for generation in self._samples.in_generation:
            started, seconds = generation.first_token_at, generation.deadline_seconds
            if started is None or seconds is None or now - started <= seconds:
                continue
            if not generation.awaits_verification and not generation.expired:
                generation.expired = True
                self._samples.interrupt(generation)

    def extend(self, seconds: float) -> None:
        """Extend every sample's deadline by the time for which the engine was paused."""
        for generation in self._samples.in_generation:
            if generation.first_token_at is not None:
                generation.first_token_at += seconds


def deadline_warning(config: SchedulerConfig) -> str | None:
    """Return the warning of a run with a deadline, if it has one."""
    seconds = config.sample_deadline_seconds
    if seconds is None:
        return None
    return (
        f"WARNING: scheduler.sample_deadline_seconds is {seconds:g}: samples that take longer are "
        "cut off, with finish reason `deadline`. The place depends on this machine's load, so "
        "those samples do not follow the policy to their end. asyncrl_finished_samples_total "
        "counts them. To limit tokens instead, set sampling.max_tokens."
    )
