"""Controller to relay."""

import msgspec

from asyncrl.wire.messages.chain import Parent
from asyncrl.wire.messages.files import Server
from asyncrl.wire.weights.layout import WeightManifest


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of this direction."""


class ServeWeights(Message, frozen=True):
    """Serve weights that the trainer of this relay's node has published to other nodes."""

    manifest: WeightManifest
    attempt: int
    """Number of this order; `WeightsFailed` names it."""


class ForgetWeights(Message, frozen=True):
    """Free the memory of this node's trainer's weights, as the trainer is gone."""


class FetchWeights(Message, frozen=True):
    """Bring these weights to this relay's node; answer with `WeightsHere` or `WeightsFailed`."""

    manifest: WeightManifest
    parents: tuple[Parent, ...]
    """Nodes to ask, the nearest first."""
    attempt: int


class CheckWeights(Message, frozen=True):
    """Check a file that a process of this node could not read; answer with `WeightsChecked`."""

    path: str


class FileSource(msgspec.Struct, frozen=True):
    """A node without access to the run's folder, which has files of it in a separate folder."""

    server: Server
    folder: str
    processes: tuple[str, ...]
    """Processes that are or were on the node: only their files are copied."""


class PullFiles(Message, frozen=True):
    """Copy what these nodes, and no others, write into the run's folder, from now on."""

    sources: tuple[FileSource, ...]


class FinishPull(Message, frozen=True):
    """Copy what is left after all other processes have ended; answer with `PullFinished`."""

    seconds: float


class FetchFile(Message, frozen=True):
    """Bring a file to this relay's node; answer with `FileHere` or `FileMissing`."""

    attempt: int
    path: str
    servers: tuple[Server, ...]
    """Relays that may have it, the most likely first."""


class RemoveFiles(Message, frozen=True):
    """Remove the files of this node, as the run has ended and its folder has copies of all."""


class Shutdown(Message, frozen=True):
    """End the process; answer with `Goodbye`."""


_OfWeights = ServeWeights | ForgetWeights | FetchWeights | CheckWeights
_OfFiles = PullFiles | FinishPull | FetchFile | RemoveFiles
ToRelay = _OfWeights | _OfFiles | Shutdown
