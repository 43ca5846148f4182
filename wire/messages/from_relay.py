"""Relay to controller."""

from __future__ import annotations

from typing import Annotated

import msgspec

from asyncrl.wire.weights.layout import WeightManifest


class Message(msgspec.Struct, frozen=True, tag=lambda name: f"relay.{name}"):
    """Base of this direction; the tag names the sender, as the controller's hub receives others."""


class FilesReady(msgspec.Struct, frozen=True):
    """Where a relay serves the files of its node."""

    address: str = ""
    folder: str = ""
    """Id of the folder."""
    shares_run_directory: bool = True
    """Whether it is the run's folder itself."""


class RelayReady(Message, frozen=True):
    """All parts of the relay listen."""

    source: str
    """Where it serves the weights of this node's trainer."""
    node: str
    """Where it serves the weights that this node has received."""
    files: FilesReady = FilesReady()
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None


class WeightsHere(Message, frozen=True):
    """The weights that were to be fetched are in this node's memory."""

    attempt: int
    """As in `FetchWeights`."""
    manifest: WeightManifest
    """Of the file on this node."""
    seconds: float
    nbytes: int
    """That came over the network."""
    left: dict[str, str]
    """Parents that were left, and why."""


class WeightsFailed(Message, frozen=True):
    """Weights cannot be served or fetched."""

    attempt: int
    """Of the order that failed."""
    reason: str
    superseded: bool
    """Nobody has this version any longer, because a newer one was published or its trainer ended.
    """


class WeightsChecked(Message, frozen=True):
    """The answer to `CheckWeights`."""

    path: str
    exists: bool
    """Whether the file is there, with whatever version."""


class FileHere(Message, frozen=True):
    """A file that was to be fetched is in this node's folder of the run."""

    attempt: int
    """As in `FetchFile`."""
    path: str


class FileMissing(Message, frozen=True):
    """A file could not be fetched."""

    attempt: int
    path: str
    reason: str


class PullFinished(Message, frozen=True):
    """The answer to `FinishPull`."""

    left: dict[str, str]
    """Relays whose files were not all copied, and why."""


class RelayReport(Message, frozen=True):
    """Sent once a second, so it also shows that the process is alive."""

    sent_bytes: int
    """Of weights, so far."""
    file_bytes: int = 0
    """Of files that were sent to other nodes, so far."""
    pulled_bytes: int = 0
    """Of files that were copied from other nodes, so far."""


class Failure(Message, frozen=True):
    """The process failed and is about to end."""

    reason: str
    user_error: bool


class Goodbye(Message, frozen=True):
    """The process ends because it was told to."""


FromRelay = (
    RelayReady
    | WeightsHere
    | WeightsFailed
    | WeightsChecked
    | FileHere
    | FileMissing
    | PullFinished
    | RelayReport
    | Failure
    | Goodbye
)
