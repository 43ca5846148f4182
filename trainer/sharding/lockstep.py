"""What the ranks of a trainer do next, when none of them can do it alone.

With weights in parts (`trainer.sharding: full`) each micro-batch brings them together, so all ranks
compute one at a time. Groups arrive when they do. So before each micro-batch every rank says in a
few bytes what it has, and all draw the same conclusion:

    rank 0  a micro-batch ─┐                  ┌─► computes it
    rank 1  nothing yet   ─┴─ words, decided ─┴─► computes an empty one, whose gradient is 0

Nobody waits for groups of another rank: a rank without groups says so at once, and takes part. A
trainer of one process, and ranks that have all weights, decide alone, by the same rules.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch.distributed as dist

from asyncrl.trainer.base.errors import RankLost
from asyncrl.trainer.ranks.world import World


class Has(enum.IntEnum):
    """What a rank has to do."""

    NOTHING = 0
    """It waits for groups of the step, or for its plan."""
    WORK = 1
    """A micro-batch."""
    DONE = 2
    """All groups of the step's plan are accumulated."""
    OVER = 3
    """The run has ended for it."""


class Word(NamedTuple):
    """What a rank says."""

    has: Has
    saves: bool = False
    """Whether it was told to write a checkpoint now. It computes nothing before that."""


class Act(enum.Enum):
    """What all ranks do."""

    COMPUTE = enum.auto()
    """A micro-batch each, an empty one where there is no work."""
    SAVE = enum.auto()
    FINISH = enum.auto()
    """The step."""
    END = enum.auto()
    """The run."""
    WAIT = enum.auto()


def decided(words: Sequence[Word]) -> Act:
    """What follows from the words of all ranks. Pure.

    All ranks get the same commands in the same order, so where one has a checkpoint to write or a
    plan that is fulfilled, the others will have.

    >>> decided([Word(Has.WORK), Word(Has.DONE)]), decided([Word(Has.DONE), Word(Has.NOTHING)])
    (<Act.COMPUTE: 1>, <Act.WAIT: 5>)
    >>> decided([Word(Has.DONE)]), decided([Word(Has.NOTHING, saves=True)])
    (<Act.FINISH: 3>, <Act.SAVE: 2>)
    """
    if all(one.saves for one in words):
        return Act.SAVE
    found = {one.has for one in words}
    if Has.WORK in found:
        return Act.COMPUTE
    if len(found) > 1 or any(one.saves for one in words):
        return Act.WAIT
    return {Has.DONE: Act.FINISH, Has.OVER: Act.END}.get(found.pop(), Act.WAIT)


class Lockstep:
    """Of one rank. All ranks make the same calls in the same order; `begin` says a word, too.

    Args:
        world: the ranks; `ALONE` where each decides for itself.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.computed = 0
        """Micro-batches of this rank, with the empty ones."""
        self.empty = 0
        """Empty ones among them."""

    @property
    def is_shared(self) -> bool:
        """Whether other ranks take part."""
        return self._world.size > 1

    def said(self, word: Word) -> Act:
        """Say a word, wait for those of the others, decide. Raises RankLost."""
        own = bytes([word.has, word.saves])
        found = self._world.gather(own, "what they have to do")
        return decided([Word(Has(one[0]), bool(one[1])) for one in found])

    @contextlib.contextmanager
    def begin(self) -> Iterator[None]:
        """Around a micro-batch of this rank, with which all of them compute one.

        Raises:
            RankLost: another rank did not take part.
        """
        if self.is_shared:
            self.said(Word(Has.WORK))
        with self.turn(is_empty=False):
            yield

    @contextlib.contextmanager
    def turn(self, *, is_empty: bool) -> Iterator[None]:
        """Around a micro-batch that was decided. Raises RankLost."""
        self.computed += 1
        self.empty += is_empty
        try:
            yield
        except RuntimeError as error:
            if not self.is_shared or not _is_of_exchange(error):
                raise
            first = next(iter(str(error).splitlines()), "")
            raise RankLost(
                f"rank {self._world.rank} of {self._world.size} lost another one in a micro-batch: "
                f"{first}"
            ) from error

    def most(self, own: int) -> int:
        """The largest of a number of each rank. Raises RankLost."""
        found = self._world.gather(msgspec.msgpack.encode(own), "how much they have to do")
        return max(msgspec.msgpack.decode(one, type=int) for one in found)


def _is_of_exchange(error: RuntimeError) -> bool:
    """Whether an error is of torch's communication; gloo's have no type of their own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)
