"""Build a `SchedulerView`: the numbers, and in words what each wait waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.records import DELIVERING
from scheduler.view import GeneratorView, SchedulerView, counted, named

if TYPE_CHECKING:
    from scheduler.scheduler import Scheduler


def snapshot(scheduler: Scheduler) -> SchedulerView:
    """The whole state in numbers."""
    generators = tuple(
        GeneratorView(
            name=g.name,
            slots=g.slots,
            policy_version=g.version,
            installing=g.installing,
            queued=g.load - g.running,
            running=g.running,
            held=g.held,
        )
        for g in scheduler.work.generators.values()
    )
    counts = scheduler.ledger.counts()
    return SchedulerView(
        step=scheduler.step,
        total_steps=scheduler.total_steps,
        policy_version=scheduler.published,
        newest_open_step=scheduler.newest_open_step,
        groups_in_flight=len(scheduler.work.groups),
        groups_waiting=counts.arrived,
        groups_consumed=counts.consumed,
        groups_failed=counts.failed,
        samples_queued=sum(g.queued for g in generators)
        + scheduler.work.placement.unplaced_samples(),
        samples_running=sum(g.running for g in generators),
        samples_held=sum(g.held for g in generators),
        samples_finished=scheduler.samples_finished,
        tokens_finished=scheduler.tokens_finished,
        staleness_max=scheduler.staleness_max,
        generators=generators,
        paused=scheduler.work.paused,
        stopping=scheduler.stopping,
        finished=scheduler.finished,
        waits=waits(scheduler),
    )


def waits(scheduler: Scheduler) -> tuple[str, ...]:
    """What each wait waits for, most important first; empty only when the run is finished."""
    if scheduler.finished is not None:
        return ()
    if not scheduler.trainer_joined:
        return ("the run waits for the trainer to join",)
    lines = []
    if scheduler.work.paused:
        lines.append("the run is paused: it waits to be resumed")
    if not scheduler.work.generators:
        lines.append("the groups wait for a generator to join")
    lines += _installs(scheduler)
    lines += _drains(scheduler)
    lines += _step_in_hand(scheduler)
    if not scheduler.stopping:
        lines += _next_steps(scheduler)
    return tuple(lines)


def _installs(scheduler: Scheduler) -> list[str]:
    by_version: dict[int, list[str]] = {}
    for generator in scheduler.work.generators.values():
        if generator.installing is not None:
            by_version.setdefault(generator.installing, []).append(generator.name)
    return [
        f"policy version {version} waits to be installed by {named(names)}"
        for version, names in sorted(by_version.items())
    ]


def _drains(scheduler: Scheduler) -> list[str]:
    names = [g.name for g in scheduler.work.generators.values() if g.draining]
    text = (
        f"policy version {scheduler.published} waits for {named(names)} to finish the samples "
        "being written (scheduler.partial_rollout is false)"
    )
    return [text] if names else []


def _step_in_hand(scheduler: Scheduler) -> list[str]:
    """What the step to be trained next waits for: samples, acknowledgements or the trainer."""
    step = scheduler.step
    if scheduler.next_declared > step:
        return [f"step {step} waits for the trainer to finish it"]
    per_step = scheduler.config.groups_per_step
    own = range(step * per_step, (step + 1) * per_step)
    groups = [scheduler.work.groups[index] for index in own if index in scheduler.work.groups]
    queued = sum(group.queued for group in groups)
    verifying = sum(group.verifying for group in groups)
    stale = sum(sum(group.stale) for group in groups)
    running = sum(group.running for group in groups)
    sent = sum(group.states.count(DELIVERING) for group in groups)
    lines = []
    if queued or running:
        lines.append(
            f"step {step} waits for {counted(queued + running, 'sample')} "
            f"({running} running, {queued} to be started)"
        )
    if verifying:
        lines.append(f"step {step} waits for {counted(verifying, 'sample')} to be verified")
    if stale:
        least = scheduler.admission.min_version(step)
        lines.append(
            f"step {step} has {counted(stale, 'sample')} written under older versions, to be "
            f"verified once version {least} is installed where they are"
        )
    if sent:
        lines.append(f"step {step} waits for the trainer to acknowledge {counted(sent, 'sample')}")
    return lines


def _next_steps(scheduler: Scheduler) -> list[str]:
    """Why no later group is open."""
    group, per_step = scheduler.newest_open_group + 1, scheduler.config.groups_per_step
    step = group // per_step
    if step >= scheduler.total_steps:
        return []
    admission = scheduler.admission
    version = admission.first_version_to_start(group)
    limits = f"scheduler.max_off_policy_steps is {admission.max_off_policy_steps}"
    if admission.verifies:
        limits += f", max_runahead_groups {admission.max_runahead_groups}"
    return [f"step {step} waits for policy version {version} to be published ({limits})"]
