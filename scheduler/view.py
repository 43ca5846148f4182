"""A snapshot of the scheduler in numbers, for status and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.scheduler.commands import FinishRun
from asyncrl.scheduler.state import SchedulerState
from asyncrl.scheduler.waits import waits


@dataclass(frozen=True, slots=True)
class GeneratorView:
    """One generator that is alive."""

    name: str
    slots: int
    """Samples that it decodes at once."""
    policy_version: int
    """The version that it is known to sample from."""
    installing: int | None
    """The version that it was told to install and has not answered for; None if there is none."""
    queued: int
    """Samples placed on it and not started."""
    running: int
    """Samples issued to it and not finished."""
    leaving: bool
    """Whether it was ordered to leave and has samples."""
    held: int
    """Finished samples that it holds, including those on their way to the trainer."""


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The whole state in numbers. Cost: O(generators + groups of the current step)."""

    step: int
    """The current step: the next one to be trained, or the one in training."""
    total_steps: int
    """Steps of the whole run."""
    policy_version: int
    """Latest published version."""
    last_open_step: int
    """Work is admitted for steps up to this one; `step - 1` if for none."""
    groups_issued: int
    """Groups issued and not withdrawn since this process began."""
    groups_waiting: int
    """Groups that are complete in the trainer and not trained on yet."""
    groups_consumed: int
    """Groups trained on since this process began."""
    groups_failed: int
    """Groups reported failed since this process began."""
    samples_queued: int
    """Samples admitted and not started."""
    samples_running: int
    """Samples started and not finished."""
    samples_held: int
    """Samples finished and not acknowledged by the trainer."""
    samples_finished: int
    """Accepted `SampleFinished` events since this process began, including reissued samples."""
    tokens_finished: int
    """Response tokens of these samples."""
    staleness_max: int
    """Largest staleness of a finished sample's oldest token, for the step that it belongs to."""
    generators: tuple[GeneratorView, ...]
    """In the order in which they joined."""
    paused: bool
    """Whether the user paused the run."""
    stopping: bool
    """Whether the user asked to stop the run."""
    finished: FinishRun | None
    """The command that ended the run; None while the run continues."""
    waits: tuple[str, ...]
    """What each wait waits for, most important first; empty only if the run is finished."""
    groups_without_signal: int = 0
    """Groups left out because they carry no signal, since this process began."""
    groups_left_over: int = 0
    """Times that a group was begun for a step and belongs to a later one, since this process began;
    0 without dynamic sampling."""
    signal_share: float | None = None
    """Expected share of groups with signal, 0 to 1; None without dynamic sampling."""


def view_of(state: SchedulerState) -> SchedulerView:
    """Sum up the state."""
    generators = tuple(
        GeneratorView(
            name=g.name,
            slots=g.slots,
            policy_version=g.version,
            installing=g.installing,
            queued=g.load - g.running,
            running=g.running,
            leaving=g.leaving,
            held=g.held,
        )
        for g in state.generators.values()
    )
    counts = state.ledger.counts()
    queued = sum(g.queued for g in generators) + state.placement.unplaced_samples()
    return SchedulerView(
        step=state.step,
        total_steps=state.total_steps,
        policy_version=state.published,
        last_open_step=state.last_open_group // state.config.groups_per_step,
        groups_issued=counts.issued,
        groups_waiting=counts.arrived,
        groups_consumed=counts.consumed,
        groups_failed=counts.failed,
        groups_without_signal=counts.without_signal,
        groups_left_over=0 if state.places is None else state.places.left_over,
        signal_share=None if state.places is None else state.places.share,
        samples_queued=queued,
        samples_running=sum(g.running for g in generators),
        samples_held=sum(g.held for g in generators),
        samples_finished=state.samples_finished,
        tokens_finished=state.tokens_finished,
        staleness_max=state.staleness_max,
        generators=generators,
        paused=state.paused,
        stopping=state.stopping,
        finished=state.finished,
        waits=waits(state),
    )
