"""What can go wrong in the scheduler.

SchedulerError      an event that cannot happen, or a broken invariant: a bug, or a liar on the wire
└── LedgerError     a group would be consumed twice, out of turn, or without having been issued

Nothing here is for a user to fix by configuration; the run ends, and can be resumed.
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Root of what the scheduler raises; nothing was changed by the event that raised it."""


class LedgerError(SchedulerError):
    """The books would no longer say that each group is trained on exactly once."""
