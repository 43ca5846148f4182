"""Records of the work in flight: one per group, one per generator.

States of a sample (a byte in its group's `states`). If its generator is lost, a sample returns from
any state except the last one to QUEUED. If the trainer is lost, see `asyncrl.scheduler.scheduler`.

    QUEUED ──StartSample──► RUNNING ──SampleFinished──► HELD ──DeliverGroup──► DELIVERING
      ▲                        │                        │  ▲                       │
      │                        │         VerifySamples  ▼  │ SampleFinished        │
      │                        │                      VERIFYING                    │
      └──── GeneratorLost ─────┴──────────────────────────┴────────────────────────┤
                                                            SampleDelivered ──► DELIVERED

A RUNNING sample that must be verified stays RUNNING: its generator verifies its tokens and resumes
the sample from the accepted prefix.

A group carries **signal** if its rewards are not all equal. If they are, every advantage that
compares a sample with the others of its group is 0. Rewards are compared as the trainer gets them,
in float32, before any penalty of the trainer's (`trainer.overlong_buffer`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from asyncrl.rollout.trajectory import SampleId

UNIT = 1024
"""Weight of a group that certainly carries signal; others weigh in proportion to their
probability."""
_MEMORY = 0.75
"""Decay of the share with signal per step: it changes as the policy learns."""


class Verdict(Enum):
    """Knowledge of a group's signal, only from data that its step may train on."""

    OPEN = "open"
    """Not all of its samples are finished, new enough and rewarded."""
    SIGNAL = "signal"
    NO_SIGNAL = "no signal"


@dataclass(slots=True, eq=False)
class GroupSignal:
    """The scheduler's knowledge of a group's samples beyond their states."""

    rewards: list[float | None]
    """`[group_size]` rewards of the contents reported last; None if not computed yet."""
    oldest: list[int]
    """`[group_size]` lower bound of the tokens' versions of each sample."""
    verdict: Verdict = Verdict.OPEN

    @classmethod
    def new(cls, size: int) -> GroupSignal:
        """Create it for a group with no sample started."""
        return cls([None] * size, [-1] * size)

    def forget(self, sample: int, oldest: int = -1) -> None:
        """Forget the reward and verdict of a sample with other contents, or none.

        `oldest` is the new lower bound of its tokens' versions.
        """
        self.rewards[sample], self.oldest[sample] = None, oldest
        self.verdict = Verdict.OPEN


def has_signal(rewards: Sequence[float]) -> bool:
    """Return True if the rewards of a group are not all equal.

    >>> has_signal([0.0, 1.0]), has_signal([1.0, 1.0]), has_signal([0.1, 0.1 + 1e-12])
    (True, False, False)
    """
    return len(set(array("f", rewards))) > 1


class SignalShare:
    """Estimates which share of the groups carries signal, from those that steps have looked at.

    A mean over the last steps, with a prior of one step's worth of groups with signal. It decides
    how many groups are issued, and so when, and nothing else. `max_batches` are the groups that a
    step may look at, in multiples of `groups_per_step`.

    >>> share = SignalShare(groups_per_step=4, max_batches=8)
    >>> share.weight == UNIT
    True
    >>> share.step(with_signal=4, without=12)
    >>> round(share.weight / UNIT, 2)  # (3 + 4) of (3 + 16)
    0.37
    """

    def __init__(self, *, groups_per_step: int, max_batches: int) -> None:
        self._with = float(groups_per_step)
        self._all = float(groups_per_step)
        self._least = max(1, UNIT // max_batches)

    def step(self, *, with_signal: int, without: int) -> None:
        """Note the groups that a step has looked at."""
        self._with = _MEMORY * self._with + with_signal
        self._all = _MEMORY * self._all + with_signal + without

    @property
    def weight(self) -> int:
        """Expected share with signal of unknown groups, in units of 1 / `UNIT`."""
        return min(UNIT, max(self._least, round(UNIT * self._with / max(1.0, self._all))))


class SampleState(IntEnum):
    """State of a sample. A sample has exactly one of these until its group is settled."""

    QUEUED = 0
    """Waits to be started on its group's generator."""
    RUNNING = 1
    """Issued to that generator, which decodes it or has it in its own queue."""
    HELD = 2
    """Finished and held by that generator; its reward may still be being computed."""
    DELIVERING = 3
    """That generator was ordered to send it to the trainer."""
    DELIVERED = 4
    VERIFYING = 5
    """Was held with tokens that are too old for its step; that generator verifies it."""


# Plain ints, because the hot path writes them into bytearrays.
QUEUED, RUNNING, HELD, DELIVERING, DELIVERED, VERIFYING = (int(state) for state in SampleState)
STARTED = (RUNNING, HELD, VERIFYING)
"""States of a sample that only its generator has."""


@dataclass(slots=True, eq=False)
class Group:
    """A group that is neither in the trainer nor failed."""

    index: int
    step: int
    """The step that trains on it; with dynamic sampling, the expected one until it is delivered."""
    key: int | None
    """Prompt index, for placement; None if the scheduler was not given a `group_key`."""
    states: bytearray
    """`[group_size]` the `SampleState` of each sample."""
    attempts: bytearray
    """`[group_size]` how many times each sample was started."""
    sent: bytearray
    """`[group_size]` 1 once any generator was ordered to deliver the sample."""
    stale: bytearray
    """`[group_size]` 1 while the sample is HELD with tokens that its step may not train on."""
    queued: int
    verifying: int = 0
    running: int = 0
    delivered: int = 0
    owner: Generator | None = None
    """The generator of all its samples that are not delivered, if there is one."""
    place: int = 0
    """Its index; with dynamic sampling, the index that it would have if all groups carried
    signal."""
    signal: GroupSignal | None = None

    @classmethod
    def new(cls, index: int, step: int, key: int | None, size: int) -> Group:
        """Create a group with no sample started."""
        states, attempts, sent, stale = (bytearray(size) for _ in range(4))
        return cls(index, step, key, states, attempts, sent, stale, queued=size, place=index)

    def __lt__(self, other: Group) -> bool:
        """Data order. A heap may hold an outdated and a present group of one index."""
        return self.index < other.index

    @property
    def untouched(self) -> bool:
        """True if none of its samples was ever started."""
        return not any(self.attempts)


@dataclass(slots=True, eq=False)
class Generator:
    """A live generator."""

    name: str
    number: int
    """Number of generators that joined before it."""
    slots: int
    limit: int
    """Maximum of samples RUNNING here, except those that wait for their environment."""
    version: int
    """Policy version that it is known to sample from; it may already have a later one."""
    installing: int | None = None
    """Version whose install was commanded and not answered, if any."""
    requested: dict[SampleId, int] = field(default_factory=dict)
    """Samples whose verification was commanded together with that install, with the lowest allowed
    version of their tokens."""
    groups: dict[int, Group] = field(default_factory=dict)
    queue: list[tuple[int, Group]] = field(default_factory=list)
    """Heap of groups to be started, earliest in data order first. An entry is outdated if the group
    moved or has nothing left to start; it is skipped when it reaches the top."""
    begun: list[tuple[int, Group]] = field(default_factory=list)
    """Heap of groups whose samples are being started; no other generator takes these over. Entries
    may be outdated. There are several live ones only if a full KV space made the generator turn to
    an earlier group."""
    running: int = 0
    load: int = 0
    """Samples QUEUED or RUNNING here."""
    held: int = 0
    """Samples HELD, VERIFYING or DELIVERING here."""
    verifying: int = 0
    most: int = 0
    """Maximum of samples RUNNING here, including those that wait for their environment."""
    waiting: int = 0
    """Samples that waited for their environment at its last report; see `in_environments`."""
    kv_used: float = 0.0
    """Share of its KV space in use at its last report, 0 to 1."""
    speed: float = 1.0
    """Relative to the other generators (`asyncrl.scheduler.placement`)."""
    rewinding: bool = False
    """True while an ordered rewind is unanswered: its reports may be about policies that are gone,
    and it gets no work."""
    leaving: bool = False
    """True if it was ordered to leave and gets no other work (`asyncrl.scheduler.scheduler`)."""
    draining: bool = False
    """True while it finishes its samples and starts none, so that new weights can be installed."""

    @property
    def width(self) -> int:
        """Samples that it can usefully decode at once."""
        return min(self.slots, self.limit)

    @property
    def in_environments(self) -> int:
        """RUNNING samples that probably wait for their environment, and take no slot."""
        return min(self.waiting, self.running)

    @property
    def wanted(self) -> int:
        """Samples QUEUED or RUNNING here that take a slot, or would."""
        return self.load - self.in_environments if self.waiting else self.load

    @property
    def room(self) -> int:
        """Samples that may be started here now, if above 0."""
        free = self.limit - self.running
        if not self.waiting:
            return free
        return min(free + self.in_environments, self.most - self.running)

    def will_verify(self, sample: SampleId) -> int:
        """Tokens older than this are verified as soon as the outstanding install is done."""
        return -1 if self.installing is None else self.requested.get(sample, -1)

    @property
    def target(self) -> int:
        """The version that it will have when its outstanding install is done."""
        return self.version if self.installing is None else self.installing
