"""What the scheduler remembers of work in flight: one record per group, one per generator.

Life of a sample (a byte in its group's `states`); a lost generator sends all but the last back:

    QUEUED ──StartSample──► RUNNING ──SampleFinished──► HELD ──DeliverGroup──► DELIVERING
      ▲                        │                        │  ▲                       │
      │                        │         VerifySamples  ▼  │ SampleFinished        │
      │                        │                      VERIFYING                    │
      └──── GeneratorLost ─────┴──────────────────────────┴────────────────────────┤
                                                            SampleDelivered ──► DELIVERED

A RUNNING sample that is to be verified stays RUNNING: its generator begins it again from what it
has written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class SampleState(IntEnum):
    """Where a sample is. Exactly one of these until its group is settled."""

    QUEUED = 0
    """To be started on its group's generator."""
    RUNNING = 1
    """Issued to that generator, which decodes it or has it in its own queue."""
    HELD = 2
    """Written; that generator holds it, its reward may still be computed."""
    DELIVERING = 3
    """That generator was told to send it to the trainer."""
    DELIVERED = 4
    """Safe in the trainer."""
    VERIFYING = 5
    """Was held with tokens too old to be trained on; its generator verifies it."""


# Plain ints: the hot path writes them into bytearrays.
QUEUED, RUNNING, HELD, DELIVERING, DELIVERED, VERIFYING = (int(state) for state in SampleState)


@dataclass(slots=True, eq=False)
class Group:
    """A group that is neither in the trainer nor failed."""

    index: int
    step: int
    key: int | None
    """Its prompt, for affinity; None when the scheduler was not told how to find it."""
    states: bytearray
    """`[group_size]` a `SampleState` each."""
    attempts: bytearray
    """`[group_size]` how often each sample was started."""
    sent: bytearray
    """`[group_size]` 1 once any generator was told to deliver the sample."""
    stale: bytearray
    """`[group_size]` 1 while the sample is HELD with tokens that its step may not train on."""
    queued: int
    """Samples in state QUEUED."""
    verifying: int = 0
    """Samples in state VERIFYING."""
    running: int = 0
    """Samples in state RUNNING."""
    delivered: int = 0
    """Samples in state DELIVERED."""
    owner: Generator | None = None
    """The generator of all its samples that are not delivered; None while there is none."""

    @classmethod
    def new(cls, index: int, step: int, key: int | None, size: int) -> Group:
        """A group of which nothing was started."""
        states, attempts, sent, stale = (bytearray(size) for _ in range(4))
        return cls(index, step, key, states, attempts, sent, stale, queued=size)

    @property
    def untouched(self) -> bool:
        """Nothing of it was ever started."""
        return not any(self.attempts)


@dataclass(slots=True, eq=False)
class Generator:
    """A generator that is alive."""

    name: str
    number: int
    """How many joined before it."""
    slots: int
    limit: int
    """Most samples RUNNING here."""
    version: int
    """Policy version that it is known to sample from (it may be newer already)."""
    installing: int | None = None
    """Version whose installation was commanded and not answered."""
    groups: dict[int, Group] = field(default_factory=dict)
    """Groups that it owns, by index."""
    queue: list[tuple[int, Group]] = field(default_factory=list)
    """Heap of groups to be started, earliest in data order first. Entries may be outdated (the
    group moved, or nothing of it is left to start): they are skipped when they surface."""
    begun: list[tuple[int, Group]] = field(default_factory=list)
    """Heap of groups whose samples are being started; nobody takes these over. Outdated as well.
    More than one only when something made it turn to an earlier group (a full KV space)."""
    running: int = 0
    """Samples RUNNING here."""
    load: int = 0
    """Samples QUEUED or RUNNING here."""
    held: int = 0
    """Samples HELD, VERIFYING or DELIVERING here."""
    verifying: int = 0
    """Samples VERIFYING here."""
    kv_used: float = 0.0
    """Share of its KV space in use, when it last said."""
    draining: bool = False
    """It finishes what it writes and starts nothing, so that new weights can be installed."""

    @property
    def width(self) -> int:
        """Samples that it can usefully decode at once."""
        return min(self.slots, self.limit)

    @property
    def target(self) -> int:
        """The version that it has, or will have when its outstanding installation is done."""
        return self.version if self.installing is None else self.installing
