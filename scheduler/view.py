"""A snapshot of the scheduler in numbers, for status and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from asyncrl.scheduler.records import DELIVERING, HELD, Group
from asyncrl.scheduler.state import SchedulerState


def waits(state: SchedulerState, needs: _Needs, about: str) -> tuple[str, ...]:
    """Describe each wait's reason, most important first; empty only if the run is finished.

    `needs` are those of the current step; `about` is that of `Scheduler.snapshot`.
    """
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
    lines += _current_step(state, needs, about)
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


class _Needs(NamedTuple):
    """The samples of the current step by what they lack."""

    queued: int
    running: int
    verifying: int
    stale: int
    unrewarded: int
    sent: int

    @classmethod
    def of(cls, state: SchedulerState, unscored: int) -> _Needs:
        groups = _groups_of(state, state.step)
        sent = sum(group.states.count(DELIVERING) for group in groups)
        unscored = min(unscored, sent)
        return cls(
            queued=sum(group.queued for group in groups),
            running=sum(group.running for group in groups),
            verifying=sum(group.verifying for group in groups),
            stale=sum(sum(group.stale) for group in groups),
            unrewarded=sum(_waits_for_rewards(group) for group in groups) + unscored,
            sent=sent - unscored,
        )


def _only_unrewarded(state: SchedulerState, needs: _Needs) -> int:
    if state.finished is not None or state.paused or state.next_undeclared > state.step:
        return 0
    others = needs.queued + needs.running + needs.verifying + needs.stale
    return 0 if others else needs.unrewarded


def _current_step(state: SchedulerState, needs: _Needs, about: str) -> list[str]:
    step = state.step
    if state.next_undeclared > step:
        return [f"step {step} waits for the trainer to finish it"]
    queued, running, verifying, stale, unrewarded, sent = needs
    lines = []
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
        of = _counted(unrewarded, "sample")
        lines.append(f"step {step} waits for the rewards of {of}{about}")
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
    if state.places is not None:
        return [group for group in state.groups.values() if group.step == step]
    per_step = state.config.groups_per_step
    indices = range(step * per_step, (step + 1) * per_step)
    return [state.groups[index] for index in indices if index in state.groups]


def _waits_for_rewards(group: Group) -> int:
    if group.signal is None or any(one != HELD for one in group.states) or 1 in group.stale:
        return 0
    return group.signal.rewards.count(None)


def _next_step(state: SchedulerState) -> list[str]:
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
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _counted(n: int, noun: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The state in numbers; groups are counted from the start of this process.

    Cost: O(generators + groups of the current step).
    """

    groups_issued: int
    """Issued and not withdrawn."""
    groups_waiting: int
    """Complete in the trainer and not trained on yet."""
    groups_consumed: int
    groups_failed: int
    groups_without_signal: int
    groups_left_over: int
    """Times that a group was begun for a step and belongs to a later one (dynamic sampling)."""
    samples_running: int
    """Samples started and not finished."""
    samples_held: int
    """Samples finished and not acknowledged by the trainer."""
    signal_share: float | None
    """Expected share of groups with signal, 0 to 1; None without dynamic sampling."""
    paused: bool
    unrewarded: int
    """Samples of the current step without a reward, if it lacks nothing but rewards; else 0."""
    waits: tuple[str, ...]
    """Reasons of waits, most important first; empty only if the run is finished."""


def view_of(state: SchedulerState, unscored: int = 0, about: str = "") -> SchedulerView:
    """Sum up the state; the arguments are those of `Scheduler.snapshot`."""
    counts, places = state.ledger.counts(), state.places
    needs = _Needs.of(state, unscored)
    return SchedulerView(
        groups_issued=counts.issued,
        groups_waiting=counts.arrived,
        groups_consumed=counts.consumed,
        groups_failed=counts.failed,
        groups_without_signal=counts.without_signal,
        groups_left_over=0 if places is None else places.left_over,
        samples_running=sum(one.running for one in state.generators.values()),
        samples_held=sum(one.held for one in state.generators.values()),
        signal_share=None if places is None else places.share,
        paused=state.paused,
        unrewarded=_only_unrewarded(state, needs),
        waits=waits(state, needs, about),
    )
