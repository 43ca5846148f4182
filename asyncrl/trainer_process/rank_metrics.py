"""What each rank of a trainer has done in a step, brought together for the step's report."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from asyncrl.trainer.ranks import World


class RankPart(msgspec.Struct, frozen=True):
    """One rank's part of a step."""

    groups: tuple[int, ...]
    """That it trained on, ascending."""
    samples: int
    """Of these groups."""
    terms: tuple[tuple[float, int], ...]
    """By reward function: the sum of what it returned, and for how many samples."""
    waited_seconds: float
    """For the other ranks, after it had the gradients of all its groups of the step."""
    follows: bool
    """Whether no generator of its samples is known to have another policy."""


def part_of(
    groups: Sequence[int],
    samples: int,
    terms: Sequence[tuple[float, ...]],
    *,
    waited_seconds: float,
    follows: bool,
) -> RankPart:
    """A rank's part; `terms` has a row for each sample that has a reward."""
    sums = tuple((math.fsum(values), len(values)) for values in zip(*terms, strict=True))
    return RankPart(tuple(sorted(groups)), samples, sums, waited_seconds, follows)


def gathered(own: RankPart, world: World) -> list[RankPart]:
    """The parts of all ranks, by rank. A collective. Raises RankLost."""
    if world.size == 1:
        return [own]
    decode = msgspec.msgpack.Decoder(RankPart).decode
    return [decode(one) for one in world.gather(msgspec.msgpack.encode(own), "a step's parts")]


def mean_terms(parts: Sequence[RankPart]) -> tuple[float, ...]:
    """Mean of what each reward function returned; empty if none scored a sample."""
    having = [part.terms for part in parts if part.terms]
    return tuple(
        math.fsum(total for total, _ in one) / sum(count for _, count in one)
        for one in zip(*having, strict=True)
    )


def lost_to_imbalance(parts: Sequence[RankPart]) -> float:
    """Seconds, mean over the ranks, in which another rank was still computing and this one was not.

    All groups of the step have arrived when its plan comes, so nothing else is waited for then.

    >>> part = RankPart((0,), 1, (), 1.0, True)
    >>> lost_to_imbalance([part, msgspec.structs.replace(part, waited_seconds=0.0)])
    0.5
    """
    return math.fsum(part.waited_seconds for part in parts) / len(parts)
