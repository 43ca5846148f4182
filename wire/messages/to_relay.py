"""Controller to relay."""

from __future__ import annotations

import msgspec

from asyncrl.wire.messages.chain import Parent
from asyncrl.wire.messages.files import Server
from asyncrl.wire.weights.layout import WeightManifest


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of this direction."""


class ServeWeights(Message, frozen=True):
    """The trainer of this relay's node has published these: let other nodes ask for them."""

    manifest: WeightManifest
    attempt: int
    """Number of this order; `WeightsFailed` names it."""


class ForgetWeights(Message, frozen=True):
    """The trainer of this node is gone: free the memory of its weights."""


class FetchWeights(Message, frozen=True):
    """Bring these weights to this relay's node; answer with `WeightsHere` or `WeightsFailed`."""

    manifest: WeightManifest
    """The trainer's."""
    parents: tuple[Parent, ...]
    """Whom to ask, the nearest first."""
    attempt: int
    """Number of this order; the answer names it."""


class CheckWeights(Message, frozen=True):
    """A process of this node could not read this file; answer with `WeightsChecked`."""

    path: str


class FileSource(msgspec.Struct, frozen=True):
    """A node that does not see the run's folder, and has files of it in a folder of its own."""

    server: Server
    folder: str
    """Id of that folder."""
    processes: tuple[str, ...]
    """That are or were on the node: only their files are copied."""


class PullFiles(Message, frozen=True):
    """Copy what these nodes write into the run's folder, from now on, and of no others."""

    sources: tuple[FileSource, ...]


class FinishPull(Message, frozen=True):
    """All other processes have ended: copy what is left; answer with `PullFinished`."""

    seconds: float


class FetchFile(Message, frozen=True):
    """Bring a file to this relay's node; answer with `FileHere` or `FileMissing`."""

    attempt: int
    """Number of this order."""
    path: str
    """In the folder of the run, here and there."""
    servers: tuple[Server, ...]
    """Who may have it, the most likely first."""


class RemoveFiles(Message, frozen=True):
    """The run has ended, and its folder has copies of all files of this node: remove them here."""


class Shutdown(Message, frozen=True):
    """End the process; answer with `Goodbye`."""


ToRelay = (
    ServeWeights
    | ForgetWeights
    | FetchWeights
    | CheckWeights
    | PullFiles
    | FinishPull
    | FetchFile
    | RemoveFiles
    | Shutdown
)
