"""Errors of the communication between processes.

WireError ├── Unreachable, NoReply, SessionFull, KeyUnusable, AddressTooLong, FolderNotPrivate ├──
FrameRefused (`asyncrl.wire.transport.decoding`) ├── PublishError, GroupBroken └── WeightsReadError
── WeightsSupersededError, WeightsNotReceivedError
"""


class WireError(Exception):
    """Base of the errors of this package."""


class Unreachable(WireError):  # noqa: N818 - says what is wrong
    """A message was sent to a peer that is not connected."""


class NoReply(WireError):  # noqa: N818 - says what happened
    """A peer did not answer in time."""


class SessionFull(WireError):  # noqa: N818 - says what is wrong
    """Too much was sent in a session that the other end has not acknowledged."""


class KeyUnusable(WireError):  # noqa: N818 - says what is wrong
    """A key file is missing, holds no key, or can be read by other users."""


class AddressTooLong(WireError):  # noqa: N818 - says what is wrong
    """The folder for sockets has a path that is too long for Unix sockets."""


class FolderNotPrivate(WireError):  # noqa: N818 - says what is wrong
    """The folder in which the processes of a node meet belongs to another user, or is open."""


class PublishError(WireError):
    """Weights could not be published; the message says what is missing."""


class GroupBroken(WireError):  # noqa: N818 - says what happened
    """A broadcast group lost a member, or one did not join or keep up in time."""


class WeightsReadError(WireError):
    """Published weights are gone, or are not what their manifest describes."""


class WeightsSupersededError(WeightsReadError):
    """The file holds another version, or was removed with its trainer."""


class WeightsNotReceivedError(WeightsReadError):
    """A version did not arrive from another process in time; the message describes the attempts."""
