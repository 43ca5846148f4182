"""User to controller, and back: what `asyncrl status|watch|stop|pause|scale|set|...` send."""

from __future__ import annotations

from typing import Any

import msgspec

WATCH_SECONDS = 60.0
"""How long a `WatchRequest` holds. A watcher repeats it in time; one that is gone is forgotten."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of requests and replies."""


class StatusRequest(Message, frozen=True):
    """Ask what the run is doing."""


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
    """Start no more groups, train those that were started as far as they fill steps, and end."""


class CheckpointRequest(Message, frozen=True):
    """Write a checkpoint after the step that is being trained; accepted once it is on the disk."""


class SetRequest(Message, frozen=True):
    """Change a setting that is safe to change while a run trains."""

    key: str
    """Such as `trainer.learning_rate`."""
    value: str
    """As on the command line, in YAML: `1e-5`, `verify`, `null`."""


class StatusReply(Message, frozen=True):
    """A snapshot of the run."""

    status: dict[str, Any]
    """For people and scripts: `asyncrl status --json`."""


class ViewReply(Message, frozen=True):
    """What those who watch are shown. Newer ones follow unasked."""

    view: dict[str, Any]
    """What the live view shows, as plain values (`asyncrl.monitoring.terminal.run_view`)."""


class Accepted(Message, frozen=True):
    """The request will be carried out."""

    message: str
    """What happens now."""
    step: int | None = None
    """For an order that is recorded (`records.command_record.OrderRecord`): the steps that were
    trained when it took effect."""


class Refused(Message, frozen=True):
    """The request will not be carried out."""

    reason: str


Request = (
    StatusRequest
    | WatchRequest
    | StopRequest
    | PauseRequest
    | ResumeRequest
    | ScaleRequest
    | DrainRequest
    | CheckpointRequest
    | SetRequest
)
Reply = StatusReply | ViewReply | Accepted | Refused
