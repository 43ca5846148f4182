"""Controller to relay."""

from __future__ import annotations

import msgspec

from wire.messages.chain import Parent
from wire.weights.layout import WeightManifest


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


class Shutdown(Message, frozen=True):
    """End the process; answer with `Goodbye`."""


ToRelay = ServeWeights | ForgetWeights | FetchWeights | CheckWeights | Shutdown
