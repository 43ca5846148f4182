"""Controller to generator."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.trajectory import SampleId
from wire.weights.layout import WeightManifest


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of this direction."""


class PromptPayload(msgspec.Struct, frozen=True):
    """A prompt as a generator needs it."""

    prompt_id: str
    tokens: bytes
    """int32, little-endian."""
    row: dict[str, Any]
    """The dataset row, handed to the reward functions (answer and whatever else it has)."""


class Generate(Message, frozen=True):
    """Write one sample and hold it until told to deliver or discard it."""

    sample: SampleId
    prompt: PromptPayload
    seed: int
    priority: int = 0


class Verify(Message, frozen=True):
    """Verify what there is of these samples under the weights installed, and write on from there.

    Samples without tokens of a version below `min_version` are left as they are.
    """

    samples: tuple[SampleId, ...]
    seeds: tuple[int, ...]
    """For each sample a seed that none of its tokens was drawn with."""
    min_version: int


class Evaluate(Message, frozen=True):
    """Write one held-out sample, reward it, report, forget it."""

    round: int
    index: int
    prompt: PromptPayload
    seed: int


class InstallWeights(Message, frozen=True):
    """Swap to these weights between two steps; running requests go on."""

    manifest: WeightManifest
    rebuild_kv: bool = False
    """Whether what runs begins again from its tokens, so that no KV of older weights is used."""


class Deliver(Message, frozen=True):
    """Send these held samples to the trainer for this step, until it acknowledges each."""

    step: int
    samples: tuple[SampleId, ...]


class Discard(Message, frozen=True):
    """Abort or forget these samples."""

    samples: tuple[SampleId, ...]


class Pause(Message, frozen=True):
    """Stop drawing tokens, keep all state."""


class Resume(Message, frozen=True):
    """Go on."""


class Shutdown(Message, frozen=True):
    """End, in order: answer with `Goodbye`."""


ToGenerator = (
    Generate | Verify | Evaluate | InstallWeights | Deliver | Discard | Pause | Resume | Shutdown
)
