"""Lines of metrics.jsonl that a killed controller did not write, from the trainer's checkpoint.

The trainer saves a step before the controller has recorded it if the controller is killed in
between. So a checkpoint holds what the trainer knows of its steps
(`asyncrl.wire.records.step.TrainedStep`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from asyncrl.wire.records.environment_counts import EnvironmentCounts
from asyncrl.wire.records.noise_floor import NoiseFloor
from asyncrl.wire.records.step import (
    IdleShares,
    StepGroups,
    StepMetrics,
    TokenCounts,
    TrainedStep,
)


def add_lost(
    recorded: Iterable[StepMetrics],
    trained: Iterable[TrainedStep],
    *,
    groups_per_step: int,
    max_groups: int | None = None,
) -> list[StepMetrics]:
    """The recorded steps, with a record of each trained step that is missing among them.

    Totals that only the controller knows (`tokens`, `noise_floor`, `reward_failures`,
    `environments`) are those of
    the record before; other numbers that only it knows are None.

    Args:
        recorded: steps of metrics.jsonl.
        trained: steps of the checkpoints.
        groups_per_step: of the run.
        max_groups: `SchedulerConfig.max_groups_of_step`.
    """
    steps = {one.step: one for one in recorded}
    for one in sorted(trained, key=lambda one: one.step):
        if one.step not in steps:
            before = steps.get(one.step - 1)
            groups = _groups_of(
                one.step,
                one.groups,
                groups_per_step,
                before=0 if before is None else before.groups.end,
                most=max_groups,
            )
            steps[one.step] = _record(one, before, groups)
    return [steps[step] for step in sorted(steps)]


def _record(one: TrainedStep, before: StepMetrics | None, groups: StepGroups) -> StepMetrics:
    worked = one.times.train_seconds + one.times.publish_seconds + one.times.wait_seconds
    seconds = worked if before is None else max(1e-9, one.time - before.time)
    times = one.times.within(seconds)
    return StepMetrics(
        step=one.step,
        time=one.time,
        groups=groups,
        wall_seconds=seconds + (0.0 if before is None else before.wall_seconds),
        step_seconds=seconds,
        tokens_per_second=None,
        engine_busy_seconds=None,
        tokens=TokenCounts() if before is None else before.tokens,
        noise_floor=NoiseFloor() if before is None else before.noise_floor,
        environments=EnvironmentCounts() if before is None else before.environments,
        idle=IdleShares(generator=None, trainer=min(1.0, times.wait_seconds / max(1e-9, seconds))),
        times=times,
        reward_failures={} if before is None else before.reward_failures,
        **msgspec.structs.asdict(one.metrics),
    )


def _groups_of(
    step: int, trained: Sequence[int], per_step: int, *, before: int = 0, most: int | None = None
) -> StepGroups:
    """The groups of a step whose record was lost with the controller.

    Only what the trainer accumulated is known. Groups that it left out must have failed, since it
    steps only when the controller has declared all others. With dynamic sampling they failed or
    carried no signal, and count as the latter, which is frequent.

    Args:
        step: whose record was lost.
        trained: the groups that it trained on.
        per_step: groups of a step.
        before: with dynamic sampling, the first group after the step before.
        most: groups that a step looks at with dynamic sampling; None without it.
    """
    if most is not None:
        end = max(trained) + 1 if len(trained) == per_step else before + most
        left_out = tuple(group for group in range(before, end) if group not in trained)
        return StepGroups(trained=tuple(trained), without_signal=left_out)
    every = range(step * per_step, (step + 1) * per_step)
    return StepGroups(
        trained=tuple(trained), failed=tuple(group for group in every if group not in trained)
    )
