"""Relay to controller."""

from typing import Annotated

import msgspec

from asyncrl.wire.weights.layout import WeightManifest


class Message(msgspec.Struct, frozen=True, tag=lambda name: f"relay.{name}"):
    """Base of this direction; the tag names the sender, as the controller's hub receives others."""


class FilesReady(msgspec.Struct, frozen=True):
    """Address and folder of a relay's files."""

    address: str = ""
    folder: str = ""
    shares_run_directory: bool = True
    """True if it is the run's folder itself."""


class RelayReady(Message, frozen=True):
    """All parts of the relay listen."""

    source: str
    """Address that serves the weights of this node's trainer."""
    node: str
    """Address that serves the weights that this node has received."""
    files: FilesReady = FilesReady()
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None


class WeightsHere(Message, frozen=True):
    """The requested weights are in this node's memory."""

    attempt: int
    manifest: WeightManifest
    seconds: float
    nbytes: int
    left: dict[str, str]
    """Parents that were abandoned, with reasons."""


class WeightsFailed(Message, frozen=True):
    """Weights cannot be served or fetched."""

    attempt: int
    reason: str
    superseded: bool
    """True if a newer version was published or its trainer ended, so no process has it."""


class WeightsChecked(Message, frozen=True):
    """The answer to `CheckWeights`."""

    path: str
    exists: bool


class FileHere(Message, frozen=True):
    """A requested file is in this node's folder of the run."""

    attempt: int
    path: str


class FileMissing(Message, frozen=True):
    """A file could not be fetched."""

    attempt: int
    path: str
    reason: str


class PullFinished(Message, frozen=True):
    """The answer to `FinishPull`."""

    left: dict[str, str]


class RelayReport(Message, frozen=True):
    """Sent once a second, so it also shows that the process is alive."""

    sent_bytes: int
    file_bytes: int = 0
    pulled_bytes: int = 0


class Failure(Message, frozen=True):
    """The process failed and is about to end."""

    reason: str
    user_error: bool


class Goodbye(Message, frozen=True):
    """The process ends on request."""


_Answer = WeightsHere | WeightsFailed | WeightsChecked | FileHere | FileMissing | PullFinished
FromRelay = _Answer | RelayReady | RelayReport | Failure | Goodbye
