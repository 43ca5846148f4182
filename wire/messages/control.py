"""Between a user's command line and the controller."""

from __future__ import annotations

from typing import Any

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of this direction."""


class StatusRequest(Message, frozen=True):
    """What is the run doing?"""


class StopRequest(Message, frozen=True):
    """Finish the step in hand, write a checkpoint, end."""


class PauseRequest(Message, frozen=True):
    """Stop drawing tokens, keep everything."""


class ResumeRequest(Message, frozen=True):
    """Go on."""


class StatusReply(Message, frozen=True):
    """A snapshot for people and scripts."""

    status: dict[str, Any]


class Accepted(Message, frozen=True):
    """The request will be carried out."""

    message: str


class Refused(Message, frozen=True):
    """It will not, and why."""

    reason: str


Request = StatusRequest | StopRequest | PauseRequest | ResumeRequest
Reply = StatusReply | Accepted | Refused
