"""Estimates the probability that a token is accepted, from votes and experience.

    base          votes for the token / (all votes + `doubt`, which grows as the match gets shorter)
    kind          the situation: share of the votes, their total, length of the match
    odds[kind]    factor on the odds of a base, from the outcomes of earlier guesses of this kind

Each row remembers the guesses of its last draft, and some that were not drafted. When it accepts
tokens, the guesses that these tested are counted: those that follow each accepted token, up to and
including the first that failed. They were fixed before the tokens were drawn, so it does not matter
which of them the engine verified.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray, IntArray

kernel = kernels_of("cache/tree")

TOTALS = 10
SHARES = 6
MATCHES = 4
KINDS = TOTALS * SHARES * MATCHES
SURE = 0.9999
"""Highest base: a few votes cannot make anything more certain."""
SHRINK = 0.5
"""Pseudo-count of hits and misses per kind that agree with the base; low, as policies differ."""
MEMORY = 16384.0
"""Guesses of a kind after which its counts are halved."""


class Experience(NamedTuple):
    """The basis of estimates, and guesses without outcome yet: R rows of at most W guesses."""

    doubts: FloatArray
    """`[max_match + 2]` votes for a token never seen here, by the length of the match."""
    odds: FloatArray
    """`[KINDS]` factor on the odds of a base; 1 if unknown."""
    counts: NDArray[np.float64]
    """`[KINDS, 3]` guesses tested, guesses that were right, sum of the bases."""
    waiting: IntArray
    """`[R]` number of guesses that a row remembers."""
    tokens: IntArray
    """`[R, W]` the guessed tokens."""
    parents: IntArray
    """`[R, W]` index of the guess before it, -1 for the row's last token; siblings are adjacent."""
    bases: FloatArray
    """`[R, W]` first estimates."""
    kinds: NDArray[np.uint8]


def no_experience(max_match: int, doubt: float, rows: int, width: int) -> Experience:
    """Return experience without any outcome, for `rows` rows of `width` guesses each."""
    lengths = np.minimum(np.maximum(np.arange(max_match + 2), 1), max_match)
    return Experience(
        (doubt * max_match / lengths).astype(np.float32),
        np.ones(KINDS, np.float32),
        np.zeros((KINDS, 3)),
        np.zeros(rows, np.int32),
        np.zeros((rows, width), np.int32),
        np.zeros((rows, width), np.int32),
        np.zeros((rows, width), np.float32),
        np.zeros((rows, width), np.uint8),
    )


def more_rows(experience: Experience) -> Experience:
    """Return the same experience with room for twice the rows."""
    rows = {
        name: np.concatenate([array, np.zeros_like(array)])
        for name, array in experience._asdict().items()
        if name in ("waiting", "tokens", "parents", "bases", "kinds")
    }
    return experience._replace(**rows)


@kernel
def kind_of(weight: float, total: float, matched: int, max_match: int) -> int:
    """Return the kind of a guess; `matched` above `max_match`: a match in the row's own text."""
    if weight >= total * 0.9999:
        share = 5
    elif weight >= total * 0.6:
        share = 4 if weight >= total * 0.85 else 3
    elif weight >= total * 0.3:
        share = 2
    else:
        share = 1 if weight >= total * 0.1 else 0
    if total > 4.5:
        size = 4 + (total > 6.5) + (total > 9.0) + (total > 12.5) + (total > 17.5) + (total > 22.5)
    else:
        size = (total > 0.7) + (total > 1.4) + (total > 2.5)
    if matched == max_match:
        match = 3
    elif matched > max_match:
        match = 2
    else:
        match = 1 if 2 * matched >= max_match else 0
    return (match * TOTALS + size) * SHARES + share


@kernel
def base_of(weight: float, total: float, doubt: float) -> float:
    """Return the first estimate, from the votes alone."""
    return min(SURE, weight / (total + doubt))


@kernel
def corrected(base: float, factor: float) -> float:
    """Correct a probability by a factor on its odds."""
    odds = base * factor
    return odds / (1.0 - base + odds)


@kernel
def learn(experience: Experience, row: int, tokens: IntArray, start: int, stop: int) -> int:
    """Count the outcomes of a row's guesses, tested by tokens[start:stop]; return their number."""
    tested = 0
    parent = -1
    item = 0
    waiting = experience.waiting[row]
    for at in range(start, stop):
        while item < waiting and experience.parents[row, item] != parent:
            item += 1
        found = -1
        while item < waiting and experience.parents[row, item] == parent:
            counts = experience.counts[experience.kinds[row, item]]
            counts[0] += 1.0
            counts[2] += experience.bases[row, item]
            if experience.tokens[row, item] == tokens[at]:
                counts[1] += 1.0
                found = item
            item += 1
            tested += 1
        if found < 0:
            break
        parent = found
    experience.waiting[row] = 0
    return tested


@kernel
def revise(experience: Experience) -> None:
    """Recompute all factors so that the estimates of each kind add up to its outcomes."""
    for kind in range(KINDS):
        trials, hits, expected = experience.counts[kind]
        if trials > 0.0:
            odds = (hits + SHRINK) / (trials - hits + SHRINK)
            believed = (expected + SHRINK) / (trials - expected + SHRINK)
            experience.odds[kind] = odds / believed
        if trials > MEMORY:
            experience.counts[kind] *= 0.5
