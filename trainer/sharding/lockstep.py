"""Decides what the ranks of a trainer do next if none of them can do it alone.

With sharded weights (`trainer.sharding: full`) each micro-batch needs all ranks, so all compute one
at a time, while groups arrive at any time. Before each micro-batch every rank sends a few bytes
about its work, and all draw the same conclusion:

    rank 0  a micro-batch ─┐                  ┌─► computes it
    rank 1  nothing yet   ─┴─ words, decided ─┴─► computes an empty one, whose gradient is 0

No rank waits for another's groups. Ranks that have all weights decide alone, by the same rules.
"""

import contextlib
import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch.distributed as dist

from asyncrl.trainer.base.errors import RankLost
from asyncrl.trainer.ranks.world import World


class RankWork(enum.IntEnum):
    """A rank's work."""

    NOTHING = 0
    """It waits for groups of the step, or for its plan."""
    WORK = 1
    DONE = 2
    """All groups of the step's plan are accumulated."""
    OVER = 3
    """The run has ended for it."""


class RankStatus(NamedTuple):
    """A rank's message."""

    has: RankWork
    saves: bool = False
    """True if it must write a checkpoint now, before it computes anything."""


class NextAction(enum.Enum):
    """The next action of all ranks."""

    COMPUTE = enum.auto()
    """A micro-batch each, an empty one without work."""
    SAVE = enum.auto()
    FINISH = enum.auto()
    END = enum.auto()
    WAIT = enum.auto()


def next_action(words: Sequence[RankStatus]) -> NextAction:
    """Decide from the messages of all ranks. Pure.

    All ranks get the same commands in the same order: if one must save or is done, all will be.

    >>> work, done = RankStatus(RankWork.WORK), RankStatus(RankWork.DONE)
    >>> nothing = RankStatus(RankWork.NOTHING)
    >>> next_action([work, done]), next_action([done, nothing])
    (<NextAction.COMPUTE: 1>, <NextAction.WAIT: 5>)
    >>> next_action([done]), next_action([nothing._replace(saves=True)])
    (<NextAction.FINISH: 3>, <NextAction.SAVE: 2>)
    """
    if all(one.saves for one in words):
        return NextAction.SAVE
    found = {one.has for one in words}
    if RankWork.WORK in found:
        return NextAction.COMPUTE
    if len(found) > 1 or any(one.saves for one in words):
        return NextAction.WAIT
    ends = {RankWork.DONE: NextAction.FINISH, RankWork.OVER: NextAction.END}
    return ends.get(found.pop(), NextAction.WAIT)


class Lockstep:
    """Coordinates one rank. Collective: all ranks call in the same order, `begin` included."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.empty = 0
        """Empty micro-batches of this rank."""

    @property
    def is_shared(self) -> bool:
        """True if other ranks take part."""
        return self._world.size > 1

    def agree(self, word: RankStatus) -> NextAction:
        """Exchange messages with the other ranks and decide. Raises RankLost."""
        own = bytes([word.has, word.saves])
        found = self._world.gather(own, "what they have to do")
        return next_action([RankStatus(RankWork(one[0]), bool(one[1])) for one in found])

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """Enclose a micro-batch of this rank, with which all ranks compute one. Raises RankLost."""
        if self.is_shared:
            self.agree(RankStatus(RankWork.WORK))
        with self.turn(is_empty=False):
            yield

    @contextlib.contextmanager
    def turn(self, *, is_empty: bool) -> Iterator[None]:
        """Enclose a micro-batch that was decided. Raises RankLost."""
        self.empty += is_empty
        try:
            yield
        except RuntimeError as error:
            # gloo's errors have no type.
            is_of_exchange = isinstance(error, dist.DistError) or "gloo" in str(error)
            if not (self.is_shared and is_of_exchange):
                raise
            first = next(iter(str(error).splitlines()), "")
            raise RankLost(
                f"rank {self._world.rank} of {self._world.size} lost one in a micro-batch: {first}"
            ) from error

    def most(self, own: int) -> int:
        """Return the largest of the ranks' numbers. Raises RankLost."""
        found = self._world.gather(msgspec.msgpack.encode(own), "how much they have to do")
        return max(msgspec.msgpack.decode(one, type=int) for one in found)
