"""Recounts the state sample by sample and compares. O(in flight); for tests and idle moments."""

from itertools import chain
from typing import NoReturn

from asyncrl.scheduler.dynamic_ledger import DynamicLedger
from asyncrl.scheduler.errors import SchedulerError
from asyncrl.scheduler.ledger import Outcome
from asyncrl.scheduler.records import (
    DELIVERED,
    DELIVERING,
    HELD,
    QUEUED,
    RUNNING,
    VERIFYING,
    Generator,
    Group,
    Verdict,
    has_signal,
)
from asyncrl.scheduler.state import SchedulerState

_STATES = (QUEUED, RUNNING, HELD, DELIVERING, DELIVERED, VERIFYING)


def check(state: SchedulerState) -> None:
    """Raise SchedulerError naming the first invariant that does not hold."""
    for group in state.groups.values():
        _check_group(state, group)
    for generator in state.generators.values():
        _check_generator(state, generator)
    _check_ledger(state)
    if isinstance(state.ledger, DynamicLedger) and state.finished is None and state.trainer_joined:
        _check_selection(state, state.ledger)


def _broken(what: str) -> NoReturn:
    raise SchedulerError(f"broken invariant: {what}")


def _check_group(state: SchedulerState, group: Group) -> None:
    name, size = f"group {group.index}", state.config.group_size
    delivering = _check_counts(group, name, size)
    step = group.place // state.config.groups_per_step
    if group.step != step:
        _broken(f"{name} is in the wrong step")
    if state.places is None and group.place != group.index:
        _broken(f"{name} is out of place")
    limit = state.config.max_attempts
    if max(group.attempts) > limit:
        _broken(f"{name} has a sample started more than {limit} times")
    busy = group.queued or group.running or group.verifying or delivering
    may_wait = 1 in group.stale or not state.trainer_joined
    may_wait |= group.index >= state.ledger.next_group  # a rewind left it ahead
    may_wait |= group.owner is not None and (group.owner.rewinding or group.owner.leaving)
    may_wait |= group.signal is not None and 1 not in group.sent  # `_check_signal`
    if not busy and not may_wait:
        _broken(f"{name} is complete, but its delivery was not commanded")
    if 1 in group.stale:
        _check_staleness(state, group, name)
    _check_owner(state, group, name)


def _check_counts(group: Group, name: str, size: int) -> int:
    """Recount the samples of a group by state; return how many are being delivered."""
    states = group.states
    if len(states) != size:
        _broken(f"{name} has {len(states)} samples, not {size}")
    counts = tuple(map(states.count, _STATES))
    queued, running, _, delivering, delivered, verifying = counts
    if sum(counts) != size:
        _broken(f"{name} has a sample in no known state")
    if queued != group.queued:
        _broken(f"{name} miscounts its queued samples")
    if running != group.running:
        _broken(f"{name} miscounts its running samples")
    if verifying != group.verifying:
        _broken(f"{name} miscounts its samples in verification")
    if delivered != group.delivered:
        _broken(f"{name} miscounts its delivered samples")
    if delivered >= size:
        _broken(f"{name} is in the trainer, but still in flight")
    return delivering


def _check_staleness(state: SchedulerState, group: Group, name: str) -> None:
    """Check that a sample that is too old is HELD, while its generator cannot verify it."""
    held = [group.states[i] == HELD for i, stale in enumerate(group.stale) if stale]
    if not all(held):
        _broken(f"{name} has a sample that is too old in another state than HELD")
    can_verify = state.places is None or state.admission.verifies
    if state.places and group.owner and not state.config.partial_rollout:
        can_verify &= group.owner.installing is None
    if can_verify and group.owner is not None and not group.owner.leaving:
        min_version = state.admission.min_version(group.step)
        if group.owner.version >= min_version:
            _broken(
                f"{name} holds samples with tokens older than version {min_version}, which its "
                "generator could verify"
            )


def _check_owner(state: SchedulerState, group: Group, name: str) -> None:
    """Check that an owner is alive, knows the group, and can reach its queued samples."""
    owner = group.owner
    if owner is None:
        untouched = group.queued + group.delivered == state.config.group_size
        if not untouched:
            _broken(f"{name} has no owner, but was started")
        return
    alive = state.generators.get(owner.name) is owner
    if not alive:
        _broken(f"{name} belongs to {owner.name}, which is lost")
    if owner.groups.get(group.index) is not group:
        _broken(f"{name} is unknown to its owner {owner.name}")
    if group.queued:
        reachable = any(entry[1] is group for entry in chain(owner.begun, owner.queue))
        if not reachable:
            _broken(f"{name} will never be started by {owner.name}")


def _check_generator(state: SchedulerState, generator: Generator) -> None:
    name, groups = f"generator {generator.name}", generator.groups.values()
    if generator.running > generator.most:
        _broken(f"{name} has more running than its limit")
    if generator.running != sum(g.running for g in groups):
        _broken(f"{name} miscounts its running")
    load = sum(g.running + g.queued for g in groups)
    if generator.load != load:
        _broken(f"{name} miscounts its load")
    held = sum(
        g.states.count(HELD) + g.states.count(DELIVERING) + g.states.count(VERIFYING)
        for g in groups
    )
    if generator.held != held:
        _broken(f"{name} miscounts what it holds")
    verifying = sum(g.verifying for g in groups)
    if generator.verifying != verifying:
        _broken(f"{name} miscounts its samples in verification")
    idle = not generator.running + generator.verifying
    stuck = generator.draining and idle and state.finished is None
    if stuck:
        _broken(f"{name} is draining, but has no sample to finish")
    if generator.target > state.published:
        _broken(f"{name} has an unpublished version")
    _check_leaving(state, generator, name)
    if not all(g.owner is generator for g in groups):
        _broken(f"{name} lists a group of another owner")


def _check_leaving(state: SchedulerState, generator: Generator, name: str) -> None:
    leaves = generator.leaving
    if (generator.name in state.leaving) is not leaves:
        _broken(f"{name} leaves, or does not")
    if leaves and not generator.groups:
        _broken(f"{name} leaves, and has nothing to wait for")
    if leaves and generator.name in state.placement:
        _broken(f"{name} leaves, but takes groups")


def _check_ledger(state: SchedulerState) -> None:
    """Check that the groups in flight are the ledger's unsettled ones, within the bound."""
    if state.finished is not None:
        if state.groups:
            _broken("the run is finished, but groups are in flight")
        return
    in_flight = sorted(group for group in state.groups if group < state.ledger.next_group)
    unsettled = list(state.ledger.unsettled())
    if in_flight != unsettled:
        _broken(f"in flight {in_flight}, but the ledger says {unsettled}")
    outstanding = state.ledger.next_group - state.ledger.first_group
    limit = state.admission.max_groups_in_flight
    if isinstance(state.ledger, DynamicLedger):
        limit = state.ledger.max_groups * (1 - (-limit // state.config.groups_per_step))
    if outstanding > limit:
        _broken(f"{outstanding} groups are issued, the bound is {limit}")


def _check_selection(state: SchedulerState, ledger: DynamicLedger) -> None:
    """Check that the undecided step's groups are settled or delivered, and no others."""
    if state.next_undeclared > state.last_step:
        held = all(1 not in group.sent for group in state.groups.values())
        if not held:
            _broken("a group is delivered after the last step")
        return
    first = ledger.first_group_of(state.next_undeclared)
    with_signal, place = 0, 0
    for index in range(first, ledger.next_group):
        outcome, group = ledger.outcome(index), state.groups.get(index)
        reached = with_signal < state.config.groups_per_step and index < first + ledger.max_groups
        if group is None:
            with_signal += outcome is Outcome.ARRIVED
            if not reached and outcome is not Outcome.FAILED:
                _broken(f"group {index} was settled too early")
            continue
        if group.place < place:
            _broken(f"group {index} has a place before that of an earlier one")
        place = group.place
        verdict = _verdict(state, group)
        is_sent = 1 in group.sent
        if not reached and is_sent:
            _broken(f"group {index} is delivered, but may not be needed")
        settled = is_sent or verdict is Verdict.OPEN
        if reached and not settled:
            _broken(f"group {index} is judged, and nothing follows")
        with_signal += is_sent or verdict is not Verdict.NO_SIGNAL


def _verdict(state: SchedulerState, group: Group) -> Verdict:
    """Return the verdict that counts, which must match the rewards."""
    signal, owner, name = group.signal, group.owner, f"group {group.index}"
    if signal is None or owner is None or 1 in group.sent:
        return Verdict.OPEN
    if owner.rewinding or (owner.leaving and state.admission.verifies):
        return Verdict.OPEN
    rewards, expected = signal.rewards, Verdict.OPEN
    if group.states.count(HELD) == len(rewards) and 1 not in group.stale and None not in rewards:
        known = [reward for reward in rewards if reward is not None]
        expected = Verdict.SIGNAL if has_signal(known) else Verdict.NO_SIGNAL
    if signal.verdict is not expected:
        _broken(f"{name} is judged {signal.verdict}, not {expected}")
    return expected
