"""Recount the books from the samples up and compare. O(in flight); for tests and idle moments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.errors import SchedulerError
from scheduler.records import (
    DELIVERED,
    DELIVERING,
    HELD,
    QUEUED,
    RUNNING,
    VERIFYING,
    Generator,
    Group,
)

if TYPE_CHECKING:
    from scheduler.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Raise SchedulerError naming the first invariant that does not hold."""
    for group in scheduler.work.groups.values():
        _check_group(scheduler, group)
    for generator in scheduler.work.generators.values():
        _check_generator(scheduler, generator)
    _check_books(scheduler)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise SchedulerError(f"broken invariant: {what}")


def _check_group(scheduler: Scheduler, group: Group) -> None:
    name, size = f"group {group.index}", scheduler.config.group_size
    states = group.states
    _require(len(states) == size, f"{name} has {len(states)} samples, not {size}")
    live = (QUEUED, RUNNING, HELD, VERIFYING, DELIVERING)
    counts = {state: states.count(state) for state in live}
    delivered = states.count(DELIVERED)
    _require(sum(counts.values()) + delivered == size, f"{name} has a sample in no known state")
    _require(counts[QUEUED] == group.queued, f"{name} miscounts its queued samples")
    _require(counts[RUNNING] == group.running, f"{name} miscounts its running samples")
    _require(counts[VERIFYING] == group.verifying, f"{name} miscounts its samples in verification")
    _require(delivered == group.delivered, f"{name} miscounts its delivered samples")
    _require(delivered < size, f"{name} is in the trainer, but still in flight")
    _require(group.step == scheduler.ledger.step_of(group.index), f"{name} is in the wrong step")
    most = scheduler.config.max_attempts
    _require(max(group.attempts) <= most, f"{name} has a sample started more than {most} times")
    _check_staleness(scheduler, group, name)
    busy = group.queued or group.running or group.verifying or counts[DELIVERING]
    _require(
        bool(busy) or 1 in group.stale, f"{name} is complete, but its delivery was not commanded"
    )
    owner = group.owner
    if owner is None:
        _require(group.queued + delivered == size, f"{name} has no owner, but was started")
        return
    alive = scheduler.work.generators.get(owner.name) is owner
    _require(alive, f"{name} belongs to {owner.name}, which is lost")
    _require(owner.groups.get(group.index) is group, f"{name} is unknown to its owner {owner.name}")
    if group.queued:
        reachable = any(entry[1] is group for entry in (*owner.begun, *owner.queue))
        _require(reachable, f"{name} will never be started by {owner.name}")


def _check_staleness(scheduler: Scheduler, group: Group, name: str) -> None:
    """What is too old is held, and only as long as its generator cannot verify it."""
    held = [group.states[i] == HELD for i, stale in enumerate(group.stale) if stale]
    _require(all(held), f"{name} has a sample that is too old in another state than HELD")
    if held and group.owner is not None:
        least = scheduler.admission.min_version(group.step)
        _require(
            group.owner.version < least,
            f"{name} holds samples with tokens older than version {least}, which its generator "
            "could verify",
        )


def _check_generator(scheduler: Scheduler, generator: Generator) -> None:
    name, groups = f"generator {generator.name}", generator.groups.values()
    _require(generator.running <= generator.limit, f"{name} has more running than its limit")
    _require(generator.running == sum(g.running for g in groups), f"{name} miscounts its running")
    load = sum(g.running + g.queued for g in groups)
    _require(generator.load == load, f"{name} miscounts its load")
    held = sum(
        g.states.count(HELD) + g.states.count(DELIVERING) + g.states.count(VERIFYING)
        for g in groups
    )
    _require(generator.held == held, f"{name} miscounts what it holds")
    verifying = sum(g.verifying for g in groups)
    _require(generator.verifying == verifying, f"{name} miscounts its samples in verification")
    idle = not generator.running + generator.verifying
    stuck = generator.draining and idle and scheduler.finished is None
    _require(not stuck, f"{name} waits for samples that it does not write")
    _require(generator.target <= scheduler.published, f"{name} has an unpublished version")
    _require(all(g.owner is generator for g in groups), f"{name} has another's group")


def _check_books(scheduler: Scheduler) -> None:
    if scheduler.finished is not None:
        _require(not scheduler.work.groups, "the run is finished, but groups are in flight")
        return
    in_flight = sorted(scheduler.work.groups)
    unsettled = list(scheduler.ledger.unsettled())
    _require(in_flight == unsettled, f"in flight {in_flight}, but the ledger says {unsettled}")
    ledger, config = scheduler.ledger, scheduler.config
    outstanding = ledger.next_group - ledger.next_step * config.groups_per_step
    bound = scheduler.admission.max_groups_in_flight
    _require(outstanding <= bound, f"{outstanding} groups are issued, the bound is {bound}")
