"""Controller to generator."""

from typing import Any, Literal

import msgspec

from asyncrl.rollout.trajectory import SampleId
from asyncrl.wire.messages.unfinished_samples import Place
from asyncrl.wire.weights.layout import WeightManifest


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of this direction."""


class PromptPayload(msgspec.Struct, frozen=True):
    """A prompt as a generator needs it."""

    prompt_id: str
    tokens: bytes
    """`[P]` int32, encoded by `asyncrl.wire.messages.data`"""
    example: dict[str, Any]
    """The dataset example, passed to the reward functions: the answer and its other fields."""


class Unfinished(msgspec.Struct, frozen=True):
    """Tokens of a resumed run, or drawn by another generator; they are verified first."""

    file: str
    """Absolute path, readable by every generator; see `wire.messages.unfinished_samples`."""
    place: Place
    seed: int
    """Replaces the sample's seed: none of its tokens was drawn or judged with this one."""


class Generate(Message, frozen=True):
    """Generate one sample and hold it until a `Deliver` or `Discard`."""

    sample: SampleId
    prompt: PromptPayload
    seed: int
    priority: int = 0
    """0: needed now. Above 0: run-ahead, by this many versions; preemptible."""
    unfinished: Unfinished | None = None
    """Begin with these tokens. If they cannot be read, begin without any, with `seed`."""
    deadline_seconds: float | None = None
    """`scheduler.sample_deadline_seconds` of its step; None: no deadline."""


class Verify(Message, frozen=True):
    """Verify samples with a token older than `min_version`, and generate what is missing."""

    samples: tuple[SampleId, ...]
    seeds: tuple[int, ...]
    """One per sample; none of the sample's tokens was drawn with it."""
    min_version: int


class ToRescore(msgspec.Struct, frozen=True):
    """Response tokens and their prompt."""

    prompt_tokens: bytes
    """`[P]` int32"""
    tokens: bytes
    """`[L]` int32"""


class FixedVersion(msgspec.Struct, frozen=True):
    """The policy that a held-out sample of a run that trains must follow, from its first token."""

    policy_version: int
    ahead: bool
    """Begin under earlier weights, as run-ahead, and verify the tokens when the version is
    installed. Otherwise begin then."""
    hold_seconds: float
    """Longest time for which the version is kept for unfinished samples with a newer one ready."""
    verify_seed: int = 0
    """Seed of the verification and what follows it; differs from the sample's seed."""


class Evaluate(Message, frozen=True):
    """Generate one held-out sample, score it, report it, and forget it."""

    round: int
    index: int
    prompt: PromptPayload
    seed: int
    fixed: FixedVersion | None = None
    """None: under the installed weights, which do not change until the end."""
    shown_of: str = ""
    """The set of the sample if it is to be recorded in samples.jsonl; otherwise empty."""


class AbandonEvaluation(Message, frozen=True):
    """Forget the held-out samples of this round."""

    round: int


class InstallWeights(Message, frozen=True):
    """Swap to these weights between two engine steps. Running requests continue."""

    manifest: WeightManifest
    rebuild_kv: bool = False
    """Recompute the KV of running requests, so that none computed by older weights is used."""
    lineage: int = 0
    verify: tuple[Verify, ...] = ()
    """Samples to verify first, in this order, after the installation. Those whose `min_version` is
    not reached are dropped, because newer weights were published in place of these."""


class Rewind(Message, frozen=True):
    """Another trainer continues from an older version: the policies of later versions are gone.

    Relabel their tokens, forget unacknowledged deliveries, generate nothing with weights that are
    gone, and answer with `Rewound`.
    """

    policy_version: int
    lineage: int
    """Number of trainers that the run had before the new one."""


class Rescore(Message, frozen=True):
    """Score tokens again without any cached KV; answer with `Rescored`."""

    number: int
    samples: tuple[ToRescore, ...]


class SaveUnfinished(Message, frozen=True):
    """Write the samples of this group and later ones, finished or not, to a file."""

    file: str
    """Absolute path; see `asyncrl.wire.messages.unfinished_samples`."""
    policy_version: int
    """Policy version of the checkpoint that the file goes with."""
    settings: str
    """Identifies the settings that the tokens are drawn with."""
    first_group: int


class Release(Message, frozen=True):
    """Write these samples, finished or not, to a file, forget them, and answer with `Released`."""

    file: str
    policy_version: int
    settings: str
    samples: tuple[SampleId, ...]
    """None of them was ordered for delivery."""


class Deliver(Message, frozen=True):
    """Send these held samples to the trainer for this step, until it acknowledges each."""

    step: int
    samples: tuple[SampleId, ...]
    lineage: int = 0
    data_address: str = ""
    """Address of the trainer's data plane, which may move; empty: the initial one."""
    rank: int = 0


class Discard(Message, frozen=True):
    """Abort or forget these samples."""

    samples: tuple[SampleId, ...]


class Pause(Message, frozen=True):
    """Stop generating tokens; keep all state."""


class Resume(Message, frozen=True):
    """Continue after a `Pause`."""


class SetLogLevel(Message, frozen=True):
    """Change the log level (`monitoring.log_level`)."""

    level: Literal["debug", "info", "warning", "error"]


class Shutdown(Message, frozen=True):
    """End the process; answer with `Goodbye`."""


_OfSamples = Generate | Verify | Evaluate | AbandonEvaluation | Rescore | Deliver | Discard
_OfFiles = SaveUnfinished | Release
_OfProcess = InstallWeights | Rewind | Pause | Resume | SetLogLevel | Shutdown
ToGenerator = _OfSamples | _OfFiles | _OfProcess
