"""What can go wrong between processes.

WireError               a socket or its address cannot be used
├── Unreachable         a message was sent to a peer that is not connected
├── NoReply             a peer did not answer in time; says what was waited for
└── AddressTooLong      the folder for sockets has too long a path; says which variable to set
"""

from __future__ import annotations


class WireError(Exception):
    """Root of what the wire raises."""


class Unreachable(WireError):  # noqa: N818 - says what is the case
    """A message was sent to a peer that is not connected."""


class NoReply(WireError):  # noqa: N818 - says what happened
    """A peer did not answer in time."""


class AddressTooLong(WireError):  # noqa: N818 - says what is the case
    """A Unix socket cannot be made under so long a path."""
