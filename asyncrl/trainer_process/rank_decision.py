"""What a rank of the trainer does when it has no group to train on, and asking the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

from asyncrl.errors import AsyncrlError
from asyncrl.trainer.sharding.lockstep import Act, Has, Lockstep, Word

OTHER_RANKS = "other ranks"
"""What is waited for at the end of a step."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.05
"""Seconds between two questions to ranks that all wait."""


def word_of(
    step: int,
    plan: frozenset[int] | None,
    done: Collection[int],
    groups: int,
    *,
    is_over: bool,
    saves: bool,
) -> tuple[Word, str]:
    """What a rank has that has no group to accumulate, and what it waits for.

    Args:
        step: that is trained.
        plan: the groups of the step; None: it has not come.
        done: groups that are accumulated.
        groups: of a step, while its plan is not known.
        is_over: whether the run has ended for it.
        saves: whether it was told to write a checkpoint now.

    Raises:
        AsyncrlError: a group is accumulated that the plan lacks.
    """
    if is_over:
        return Word(Has.OVER), OTHER_RANKS
    if saves:
        return Word(Has.NOTHING, saves=True), OTHER_RANKS
    if plan is None:
        return Word(Has.NOTHING), waited_for(len(done), groups)
    if too_many := set(done) - plan:
        raise AsyncrlError(
            f"step {step}: the controller reported groups {sorted(too_many)} as failed "
            "after they had been accumulated; resume the run from its last checkpoint"
        )
    if len(done) == len(plan):
        return Word(Has.DONE), OTHER_RANKS
    return Word(Has.NOTHING), waited_for(len(done), len(plan))


def waited_for(done: int, groups: int) -> str:
    """What a trainer without a whole group waits for, in a step of this many groups.

    `first group`: no group of the step has been trained on. `last group`: one group is missing, so
    this is the wait for the slowest sample. `step plan`: all groups are trained on, and the
    controller has not confirmed that these are all.
    """
    if done >= groups:
        return "step plan"
    if done == 0:
        return "first group"
    return "last group" if done == groups - 1 else "more groups"


async def asked(lockstep: Lockstep, word: Word, changed: asyncio.Event) -> Act:
    """What all ranks do next; `WAIT` if an event has changed what this one has.

    While all of them wait they ask each other after pauses that grow to `_LONGEST_PAUSE`: so long a
    rank that gets a group may wait for the others.

    Raises:
        RankLost: another rank did not take part.
    """
    pause = _FIRST_PAUSE
    while (act := await asyncio.to_thread(lockstep.said, word)) is Act.WAIT:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), pause)
        if changed.is_set():
            break
        pause = min(2 * pause, _LONGEST_PAUSE)
    return act
