"""User to controller, and back: messages of `asyncrl status|watch|stop|pause|scale|set|...`."""

from typing import Any

import msgspec

WATCH_SECONDS = 60.0
"""A watcher repeats its `WatchRequest` within this time; otherwise it is forgotten."""


Value = bool | int | float | str | None


class OrderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An order of the user that changed a run: a line of orders.jsonl."""

    order: str
    arguments: dict[str, bool | int | float | str]
    step: int
    """Steps trained when it took effect: the step of this number is the first one with it."""
    time: float
    """Unix time, in seconds."""
    effect: str
    before: Value | msgspec.UnsetType = msgspec.UNSET
    """The configured value without this `set` or `scale`. A resume that names this value again
    repeats an old command, and does not take the order back."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of requests and replies."""


class StatusRequest(Message, frozen=True):
    """Ask for the state of the run."""


class WatchRequest(Message, frozen=True):
    """Ask for a `ViewReply` now, and for one a second during the next WATCH_SECONDS."""


class StopRequest(Message, frozen=True):
    """Finish the current step, write a checkpoint, end the run."""


class PauseRequest(Message, frozen=True):
    """Stop generating tokens; keep all state."""


class ResumeRequest(Message, frozen=True):
    """Continue after a pause."""


class ScaleRequest(Message, frozen=True):
    """Change the number of generators."""

    generators: int


class DrainRequest(Message, frozen=True):
    """Start no more groups, train the started ones as far as they fill steps, and end."""


class CheckpointRequest(Message, frozen=True):
    """Write a checkpoint after the current step; accepted once it is on the disk."""


class SetRequest(Message, frozen=True):
    """Change a setting that is safe to change while a run trains."""

    key: str
    value: str
    """Value as on the command line, in YAML: `1e-5`, `verify`, `null`."""


class StatusReply(Message, frozen=True):
    """A snapshot of the run."""

    status: dict[str, Any]
    """Output of `asyncrl status --json`."""


class ViewReply(Message, frozen=True):
    """The view for watchers. Newer ones follow unasked."""

    view: dict[str, Any]
    """Content of the live view, as plain values (`asyncrl.monitoring.terminal.run_view`)."""


class Accepted(Message, frozen=True):
    """The request will be carried out."""

    message: str
    step: int | None = None
    """Steps trained when a recorded order took effect (`OrderRecord`)."""


class Refused(Message, frozen=True):
    """The request will not be carried out."""

    reason: str


_Change = PauseRequest | ResumeRequest | ScaleRequest | SetRequest
Request = StatusRequest | WatchRequest | StopRequest | DrainRequest | CheckpointRequest | _Change
Reply = StatusReply | ViewReply | Accepted | Refused
