"""Errors of the communication between processes.

WireError               a socket or its address cannot be used
├── Unreachable         a message was sent to a peer that is not connected
├── NoReply             a peer did not answer in time; says what was waited for
└── AddressTooLong      the path of the socket folder is too long; says which variable to set
"""

from __future__ import annotations


class WireError(Exception):
    """Base of the errors of this package."""


class Unreachable(WireError):  # noqa: N818 - says what is wrong
    """A message was sent to a peer that is not connected."""


class NoReply(WireError):  # noqa: N818 - says what happened
    """A peer did not answer in time."""


class AddressTooLong(WireError):  # noqa: N818 - says what is wrong
    """The folder for sockets has a path that is too long for Unix sockets."""
