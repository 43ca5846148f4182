"""Recounts the state sample by sample and compares. O(in flight); for tests and idle moments."""

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


def check(state: SchedulerState) -> None:
    """Raise SchedulerError naming the first invariant that does not hold."""
    for group in state.groups.values():
        _check_group(state, group)
    for generator in state.generators.values():
        _check_generator(state, generator)
    _check_ledger(state)
    if isinstance(state.ledger, DynamicLedger) and state.finished is None and state.trainer_joined:
        _check_selection(state, state.ledger)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise SchedulerError(f"broken invariant: {what}")


def _check_group(state: SchedulerState, group: Group) -> None:
    name, size = f"group {group.index}", state.config.group_size
    states = group.states
    _require(len(states) == size, f"{name} has {len(states)} samples, not {size}")
    live = (QUEUED, RUNNING, HELD, VERIFYING, DELIVERING)
    counts = {sample_state: states.count(sample_state) for sample_state in live}
    delivered = states.count(DELIVERED)
    _require(sum(counts.values()) + delivered == size, f"{name} has a sample in no known state")
    _require(counts[QUEUED] == group.queued, f"{name} miscounts its queued samples")
    _require(counts[RUNNING] == group.running, f"{name} miscounts its running samples")
    _require(counts[VERIFYING] == group.verifying, f"{name} miscounts its samples in verification")
    _require(delivered == group.delivered, f"{name} miscounts its delivered samples")
    _require(delivered < size, f"{name} is in the trainer, but still in flight")
    step = group.place // state.config.groups_per_step
    _require(group.step == step, f"{name} is in the wrong step")
    _require(state.places is not None or group.place == group.index, f"{name} is out of place")
    limit = state.config.max_attempts
    _require(max(group.attempts) <= limit, f"{name} has a sample started more than {limit} times")
    busy = group.queued or group.running or group.verifying or counts[DELIVERING]
    may_wait = 1 in group.stale or not state.trainer_joined
    may_wait |= group.index >= state.ledger.next_group  # a rewind left it ahead
    may_wait |= group.owner is not None and (group.owner.rewinding or group.owner.leaving)
    may_wait |= group.signal is not None and 1 not in group.sent  # `_check_signal`
    _require(bool(busy) or may_wait, f"{name} is complete, but its delivery was not commanded")
    _check_staleness(state, group, name)
    _check_owner(state, group, name)


def _check_staleness(state: SchedulerState, group: Group, name: str) -> None:
    """Check that a sample that is too old is HELD, while its generator cannot verify it."""
    held = [group.states[i] == HELD for i, stale in enumerate(group.stale) if stale]
    _require(all(held), f"{name} has a sample that is too old in another state than HELD")
    can_verify = state.places is None or state.admission.verifies
    if state.places and group.owner and not state.config.partial_rollout:
        can_verify &= group.owner.installing is None
    if held and can_verify and group.owner is not None and not group.owner.leaving:
        min_version = state.admission.min_version(group.step)
        _require(
            group.owner.version < min_version,
            f"{name} holds samples with tokens older than version {min_version}, which its "
            "generator could verify",
        )


def _check_owner(state: SchedulerState, group: Group, name: str) -> None:
    """Check that an owner is alive, knows the group, and can reach its queued samples."""
    owner = group.owner
    if owner is None:
        untouched = group.queued + group.delivered == state.config.group_size
        _require(untouched, f"{name} has no owner, but was started")
        return
    alive = state.generators.get(owner.name) is owner
    _require(alive, f"{name} belongs to {owner.name}, which is lost")
    _require(owner.groups.get(group.index) is group, f"{name} is unknown to its owner {owner.name}")
    if group.queued:
        reachable = any(entry[1] is group for entry in (*owner.begun, *owner.queue))
        _require(reachable, f"{name} will never be started by {owner.name}")


def _check_generator(state: SchedulerState, generator: Generator) -> None:
    name, groups = f"generator {generator.name}", generator.groups.values()
    _require(generator.running <= generator.most, f"{name} has more running than its limit")
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
    stuck = generator.draining and idle and state.finished is None
    _require(not stuck, f"{name} is draining, but has no sample to finish")
    _require(generator.target <= state.published, f"{name} has an unpublished version")
    leaves = generator.leaving
    _require((generator.name in state.leaving) is leaves, f"{name} leaves, or does not")
    _require(not leaves or bool(generator.groups), f"{name} leaves, and has nothing to wait for")
    _require(not (leaves and generator.name in state.placement), f"{name} leaves, but takes groups")
    _require(all(g.owner is generator for g in groups), f"{name} lists a group of another owner")


def _check_ledger(state: SchedulerState) -> None:
    """Check that the groups in flight are the ledger's unsettled ones, within the bound."""
    if state.finished is not None:
        _require(not state.groups, "the run is finished, but groups are in flight")
        return
    in_flight = sorted(group for group in state.groups if group < state.ledger.next_group)
    unsettled = list(state.ledger.unsettled())
    _require(in_flight == unsettled, f"in flight {in_flight}, but the ledger says {unsettled}")
    outstanding = state.ledger.next_group - state.ledger.first_group
    limit = state.admission.max_groups_in_flight
    if isinstance(state.ledger, DynamicLedger):
        limit = state.ledger.max_groups * (1 - (-limit // state.config.groups_per_step))
    _require(outstanding <= limit, f"{outstanding} groups are issued, the bound is {limit}")


def _check_selection(state: SchedulerState, ledger: DynamicLedger) -> None:
    """Check that the undecided step's groups are settled or delivered, and no others."""
    if state.next_undeclared > state.last_step:
        held = all(1 not in group.sent for group in state.groups.values())
        _require(held, "a group is delivered after the last step")
        return
    first = ledger.first_group_of(state.next_undeclared)
    with_signal, place = 0, 0
    for index in range(first, ledger.next_group):
        outcome, group = ledger.outcome(index), state.groups.get(index)
        reached = with_signal < state.config.groups_per_step and index < first + ledger.max_groups
        if group is None:
            with_signal += outcome is Outcome.ARRIVED
            _require(reached or outcome is Outcome.FAILED, f"group {index} was settled too early")
            continue
        _require(group.place >= place, f"group {index} has a place before that of an earlier one")
        place = group.place
        verdict = _verdict(state, group)
        is_sent = 1 in group.sent
        _require(reached or not is_sent, f"group {index} is delivered, but may not be needed")
        settled = is_sent or verdict is Verdict.OPEN
        _require(not reached or settled, f"group {index} is judged, and nothing follows")
        with_signal += is_sent or verdict is not Verdict.NO_SIGNAL


def _verdict(state: SchedulerState, group: Group) -> Verdict:
    """Return the verdict that counts, which must match the rewards."""
    signal, owner, name = group.signal, group.owner, f"group {group.index}"
    if signal is None or owner is None or 1 in group.sent:
        return Verdict.OPEN
    rewards = [reward for reward in signal.rewards if reward is not None]
    is_complete = all(one == HELD for one in group.states) and 1 not in group.stale
    is_complete &= len(rewards) == len(signal.rewards)
    if owner.rewinding or (owner.leaving and state.admission.verifies):
        return Verdict.OPEN
    expected = Verdict.OPEN
    if is_complete:
        expected = Verdict.SIGNAL if has_signal(rewards) else Verdict.NO_SIGNAL
    _require(signal.verdict is expected, f"{name} is judged {signal.verdict}, not {expected}")
    return expected
