"""What a run waits for, in words, for people who ask why it is not faster."""

from __future__ import annotations

from asyncrl.scheduler.records import DELIVERING, HELD, Group
from asyncrl.scheduler.state import SchedulerState


def waits(state: SchedulerState) -> tuple[str, ...]:
    """What each wait waits for, most important first; empty only if the run is finished."""
    if state.finished is not None:
        return ()
    if state.trainer_lost:
        return ("the run waits for another trainer to join in place of the lost one",)
    if not state.trainer_joined:
        return ("the run waits for the trainer to join",)
    lines = []
    if state.paused:
        lines.append("the run is paused: it waits to be resumed")
    if not state.generators:
        lines.append("the groups wait for a generator to join")
    lines += _leaves(state)
    lines += _installs(state)
    lines += _drains(state)
    lines += _current_step(state)
    if not state.stopping:
        lines += _next_step(state)
    return tuple(lines)


def _leaves(state: SchedulerState) -> list[str]:
    lines = []
    for generator in state.leaving.values():
        sent = sum(group.states.count(DELIVERING) for group in generator.groups.values())
        here = generator.running + generator.held - sent
        end = "move" if state.admission.verifies else "finish"
        parts = [f"{_counted(here, 'sample')} to {end}"] if here else []
        if sent:
            parts.append(f"the trainer to acknowledge {_counted(sent, 'sample')}")
        lines.append(f"{generator.name} leaves and waits for {' and '.join(parts) or 'its groups'}")
    return lines


def _installs(state: SchedulerState) -> list[str]:
    by_version: dict[int, list[str]] = {}
    for generator in state.generators.values():
        if generator.installing is not None:
            by_version.setdefault(generator.installing, []).append(generator.name)
    return [
        f"policy version {version} waits to be installed by {_listed(names)}"
        for version, names in sorted(by_version.items())
    ]


def _drains(state: SchedulerState) -> list[str]:
    names = [g.name for g in state.generators.values() if g.draining]
    text = (
        f"policy version {state.published} waits for {_listed(names)} to finish the running "
        "samples (scheduler.partial_rollout is false)"
    )
    return [text] if names else []


def _current_step(state: SchedulerState) -> list[str]:
    """What the current step waits for: samples, acknowledgements or the trainer."""
    step = state.step
    if state.next_undeclared > step:
        return [f"step {step} waits for the trainer to finish it"]
    groups = _groups_of(state, step)
    queued = sum(group.queued for group in groups)
    verifying = sum(group.verifying for group in groups)
    stale = sum(sum(group.stale) for group in groups)
    running = sum(group.running for group in groups)
    sent = sum(group.states.count(DELIVERING) for group in groups)
    lines = []
    unrewarded = sum(_waits_for_rewards(group) for group in groups)
    if queued or running:
        lines.append(
            f"step {step} waits for {_counted(queued + running, 'sample')} "
            f"({running} running, {queued} to be started)"
        )
    if verifying:
        lines.append(f"step {step} waits for {_counted(verifying, 'sample')} to be verified")
    if stale:
        min_version = state.admission.min_version(step)
        lines.append(
            f"step {step} has {_counted(stale, 'sample')} generated under older versions, to be "
            f"verified when their generator has installed version {min_version}"
        )
    if unrewarded:
        lines.append(f"step {step} waits for the rewards of {_counted(unrewarded, 'sample')}")
    if sent:
        lines.append(f"step {step} waits for the trainer to acknowledge {_counted(sent, 'sample')}")
    if lines and state.places is not None:
        arrived, left_out = state.ledger.progress(step)
        lines[0] += (
            f"; it has {arrived} of its {_counted(state.config.groups_per_step, 'group')} with "
            f"signal, and left {left_out} out"
        )
    return lines


def _groups_of(state: SchedulerState, step: int) -> list[Group]:
    """The groups in flight of a step; with dynamic sampling, those that are expected in it."""
    if state.places is not None:
        return [group for group in state.groups.values() if group.step == step]
    per_step = state.config.groups_per_step
    indices = range(step * per_step, (step + 1) * per_step)
    return [state.groups[index] for index in indices if index in state.groups]


def _waits_for_rewards(group: Group) -> int:
    """Samples of a finished group whose rewards are not known, with dynamic sampling."""
    if group.signal is None or any(one != HELD for one in group.states) or 1 in group.stale:
        return 0
    return group.signal.rewards.count(None)


def _next_step(state: SchedulerState) -> list[str]:
    """Why no later group is open."""
    group, admission = state.last_open_group + 1, state.admission
    step = group // state.config.groups_per_step
    if step >= state.total_steps:
        return []
    bounds = admission.of_step(step)
    limits = f"scheduler.max_off_policy_steps is {bounds.max_off_policy_steps}"
    if bounds.verifies:
        limits += f", max_runahead_groups {bounds.max_runahead_groups}"
    version = admission.first_version_to_start(group)
    return [f"step {step} waits for policy version {version} to be published ({limits})"]


def _listed(names: list[str], limit: int = 3) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _counted(n: int, noun: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
