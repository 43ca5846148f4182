"""A snapshot of the scheduler, for status, metrics and people who ask why it waits."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.commands import FinishRun


@dataclass(frozen=True, slots=True)
class GeneratorView:
    """One generator that is alive."""

    name: str
    slots: int
    policy_version: int
    installing: int | None
    """Version whose installation was commanded and not answered."""
    queued: int
    """Samples placed on it and not started."""
    running: int
    """Samples issued to it and not finished."""
    held: int
    """Finished samples that it holds, those on their way to the trainer included."""


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The whole state in numbers. Cost: O(generators + groups of the step in hand)."""

    step: int
    """The step to be trained next, or in hand."""
    total_steps: int
    policy_version: int
    """Newest published version."""
    newest_open_step: int
    """Work is admitted for steps up to this one; `step - 1` when for none."""
    groups_in_flight: int
    """Issued, neither in the trainer nor failed."""
    groups_waiting: int
    """Complete in the trainer, not trained on yet."""
    groups_consumed: int
    """Trained on since this process began."""
    groups_failed: int
    """Reported and left out since this process began."""
    samples_queued: int
    """Admitted and not started."""
    samples_running: int
    samples_held: int
    """Finished, not acknowledged by the trainer."""
    samples_finished: int
    """Accepted `SampleFinished` events since this process began, reissued samples included."""
    tokens_finished: int
    """Response tokens of those."""
    staleness_max: int
    """Largest staleness of a finished sample's oldest token, for the step that it belongs to."""
    generators: tuple[GeneratorView, ...]
    """In the order in which they joined."""
    paused: bool
    stopping: bool
    finished: FinishRun | None
    """The command that ended the run; None while the run continues."""
    waits: tuple[str, ...]
    """What each wait waits for, most important first; empty only when the run is finished."""


def named(names: list[str], limit: int = 3) -> str:
    """The first few names and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def counted(n: int, noun: str) -> str:
    """`1 sample`, `2 samples`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
