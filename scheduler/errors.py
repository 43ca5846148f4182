"""The scheduler's errors.

SchedulerError              a broken invariant: a defect
├── LedgerError             a group would be consumed twice, out of order, or unissued
└── ImpossibleEvent         an event that no state allows: its sender is faulty
    └── SenderOutOfStep     ... and the scheduler would wait for that sender forever

An impossible event has changed nothing. The controller refuses it and continues; a sender that is
out of step is killed and replaced. The others are defects, which no configuration change fixes: the
run ends and can be resumed from its last checkpoint.
"""


class SchedulerError(Exception):
    """Base class of the scheduler's errors. An event that raises it has changed no state."""


class LedgerError(SchedulerError):
    """The event contradicts the ledger: a group would not be trained on exactly once."""


class ImpossibleEvent(SchedulerError):  # noqa: N818 - names the event
    """No state allows this event: its sender is faulty. It can be ignored."""


class SenderOutOfStep(ImpossibleEvent):
    """An impossible event that contradicts its sender's orders.

    The scheduler would wait for that sender forever. Replace it.
    """
