"""Preemption: run-ahead gives its slots back when due samples need them."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.engine.protocol import Engine
from asyncrl.generator.evaluation import Evaluation
from asyncrl.generator.sample_state import SampleGeneration
from asyncrl.generator.sample_table import Samples
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics

_MIN_VERIFICATION_SLOTS = 8
"""Held samples can be verified in at least this many slots. About one group: the trainer waits for
the first one."""


def choose_preemptions(
    generations: Sequence[SampleGeneration], *, slots: int, kv_full: bool = False
) -> list[SampleGeneration]:
    """Choose the run-ahead samples to interrupt so that due samples without a slot get one.

    Verification of a held sample mostly takes one engine step. Such samples therefore count as at
    most a quarter of a large engine's slots and take turns in these.

    Args:
        generations: all samples that a generator is generating.
        slots: of its engine.
        kv_full: due samples wait for KV space, so free slots do not help.

    Returns:
        Samples in order: those of the latest steps first.
    """
    waiting = [
        one
        for one in generations
        if one.priority == 0 and not one.keeps_slot and not one.waits_for_environment
    ]
    if not waiting:
        return []
    held = sum(one.previously_held is not None for one in waiting)
    needed = len(waiting) - held + min(held, max(_MIN_VERIFICATION_SLOTS, slots // 4))
    free = 0 if kv_full else slots - sum(one.keeps_slot for one in generations)
    run_ahead = [one for one in generations if one.priority > 0 and one.keeps_slot]
    run_ahead.sort(key=lambda one: (one.priority, one.sample), reverse=True)
    return run_ahead[: max(0, needed - free)]


class Preemption:
    """Interrupts run-ahead for due samples; it resumes when there are free slots.

    Args:
        engine: its slots and its KV space are shared out.
        samples: in generation.
        evaluation: held-out samples of a run that trains.
        metrics: count the preemptions.
        kv_limit: share of the KV space in use from which on waiting requests wait for KV space.
    """

    def __init__(
        self,
        engine: Engine,
        samples: Samples,
        evaluation: Evaluation,
        metrics: GeneratorMetrics,
        *,
        kv_limit: float,
    ) -> None:
        self._engine = engine
        self._samples = samples
        self._evaluation = evaluation
        self._metrics = metrics
        self._kv_limit = kv_limit

    def make_room(self) -> None:
        """Interrupt as much run-ahead as due samples need slots."""
        stats = self._engine.stats()
        for generation in choose_preemptions(
            [*self._samples.in_generation, *self._evaluation.in_generation],
            slots=stats.slots,
            kv_full=stats.kv_used >= self._kv_limit and stats.waiting > 0,
        ):
            self._metrics.preempted.inc()
            self._samples.interrupt(generation)
