"""What can go wrong in the scheduler.

SchedulerError    an impossible event or a broken invariant: a defect, or a faulty peer on the wire
└── LedgerError   a group would be consumed twice, out of order, or without having been issued

No configuration change fixes these. The run ends and can be resumed from its last checkpoint.
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Base class of the scheduler's errors. An event that raises it has changed no state."""


class LedgerError(SchedulerError):
    """The event contradicts the ledger: a group would not be trained on exactly once."""
