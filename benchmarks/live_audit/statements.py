"""Sums that have mean 0 if every token is a draw of its distribution, given what was before.

Take the tokens of a run in the order of step, group, sample and place, and let F be everything
before a token in this order. If the run is exactly on-policy, the token is a draw of its
distribution p given F. So for every function g of (F, token) the differences g(token) - E_p g are
martingale differences, and the sum of those that a selection f(F) chooses has mean 0 and variance
sum Var_p g, which are computed and not estimated. It does not matter how the policies came about,
nor how many tokens a sample has: that it ends is part of F.

**A selection may use only what is in F.** That is where care is needed:

- the tokens before, places, turns, contexts, the prompt, the step: yes;
- the distribution at the token's place: yes, it follows from the prefix and the weights;
- the provenance of tokens *before* it, also `VERIFIED`. By block, whether a token stays accepted
  depends on later tokens; but given that the first i tokens stay accepted, the next one follows the
  policy, wherever it comes from (docs/exactness.md);
- the token's *own* provenance: no. A drafted token is one that equals its draft, and a token after
  which a row is rejected is one that was judged;
- samples of earlier steps, and samples of the same step that come earlier in the order, as a whole:
  yes. That is the statement that samples are independent;
- the length of the sample, its reward, its end, its generator where samples may move: no.

A sample that is left out *because of its tokens* breaks these sums, too: what is left is not a draw
of p. Long ones that are missing, for instance, leave stop tokens that come too often.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2, norm

from asyncrl.rollout.trajectory import Provenance
from benchmarks.live_audit.tokens import FIRST, VERSIONS_BEFORE, Doubles, Integers, Mask, Tokens

MAX_SKEW = 0.2
"""A sum whose skewness is larger is not tested: it is not normal enough."""
MAX_SHARE = 1 / 30
"""Nor is one of whose variance a single token has more."""
_ROUNDING = 1e-24
"""Variance of a token that has none: what rounding leaves of a set of all tokens."""
_BINS = 20
_HASHES = 3


@dataclass(frozen=True)
class Statement:
    name: str
    n: int
    """Tokens, pairs or groups."""
    z: float
    p_value: float
    effect: float
    """Mean deviation, in the unit of what is summed."""


@dataclass(frozen=True)
class Differences:
    """g(token) - E g of N tokens, with the moments that the distributions give."""

    value: Doubles
    variance: Doubles
    third: Doubles
    """Third central moment."""


def of_table(tokens: Tokens, table: Doubles) -> Differences:
    """`table`: g of each token of the vocabulary, `[V]` or `[N, V]`; 0 where p is 0."""
    p = tokens.probabilities
    table = np.broadcast_to(table, p.shape)
    mean = (p * table).sum(1)
    off = table - mean[:, None]
    own = np.take_along_axis(off, tokens.token[:, None], 1)[:, 0]
    return Differences(own, (p * off**2).sum(1), (p * off**3).sum(1))


def of_mass(hit: Mask, mass: Doubles) -> Differences:
    """Whether the token is in a set of this mass."""
    variance = mass * (1 - mass)
    return Differences(hit - mass, variance, variance * (1 - 2 * mass))


def sum_of(name: str, found: Differences, chosen: Mask) -> Statement | None:
    """The sum over some tokens; None if too few have variance."""
    each = found.variance[chosen]
    variance = float(each.sum())
    if variance <= _ROUNDING * len(each) or float(each.max()) > MAX_SHARE * variance:
        return None
    skew = float(found.third[chosen].sum()) / variance**1.5
    if abs(skew) > MAX_SKEW:
        return None
    z = float(found.value[chosen].sum()) / math.sqrt(variance)
    z -= skew * (z * z - 1) / 6  # Cornish-Fisher
    n = int(chosen.sum())
    return Statement(name, n, z, two_sided(z), float(found.value[chosen].mean()))


def two_sided(z: float) -> float:
    return float(2 * norm.sf(abs(z)))


def functions(tokens: Tokens, stops: Sequence[int]) -> dict[str, Differences]:
    p = tokens.probabilities
    with np.errstate(divide="ignore"):
        surprise = np.where(p > 0, np.log(np.where(p > 0, p, 1.0)), 0.0)
    stop = np.zeros(p.shape[1])
    stop[list(stops)] = 1.0
    found = {
        "log-probability": of_table(tokens, surprise),
        "probability": of_table(tokens, p),
        "most probable token": of_table(tokens, (p == p.max(1, keepdims=True)).astype(float)),
        "rare token (p < 0.05)": of_table(tokens, (p < 0.05).astype(float)),
        "stop token": of_table(tokens, stop),
    }
    for before, drift in zip(VERSIONS_BEFORE, tokens.drift, strict=True):
        found[f"log-ratio to the version {before} before"] = of_table(tokens, drift)
    for seed in range(_HASHES):
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], p.shape[1])
        found[f"half {seed + 1} of the tokens"] = of_table(tokens, signs)
    return found


def selections(tokens: Tokens) -> Iterator[tuple[str, Mask]]:
    """Which tokens, by name: functions of what was before each of them."""
    p, steps = tokens.probabilities, max(1, int(tokens.step.max()) + 1)
    yield "all", np.ones(len(tokens), np.bool_)
    yield "first token of a response", tokens.before == FIRST
    for low, high in ((1, 3), (4, 8), (9, 16), (17, 10**9)):
        yield f"places {low}-{high if high < 10**9 else ''}", _between(tokens.offset, low, high)
    for mark in Provenance:
        yield f"after a token {mark.name.lower()}", tokens.before == mark
    verified, drafted = Provenance.VERIFIED, Provenance.DRAFTED
    yield (
        "second after the last one verified",
        (tokens.before_that == verified) & (tokens.before != verified),
    )
    yield (
        "second after the last one drafted",
        (tokens.before_that == drafted) & (tokens.before == Provenance.SAMPLED),
    )
    largest = p.max(1)
    for name, low, high in (("sure", 0.95, 2.0), ("between", 0.6, 0.95), ("unsure", 0.0, 0.6)):
        yield f"policy {name}", (largest >= low) & (largest < high)
    for third in range(3):
        mine = (tokens.step * 3) // steps == third
        yield f"{('first', 'second', 'last')[third]} third of the steps", mine
    yield "prompt seen before", tokens.visit > 0
    for index in range(min(8, int(tokens.index.max()) + 1)):
        yield f"sample {index} of its group", tokens.index == index
    for turn in range(min(6, int(tokens.turn.max()) + 1) if tokens.turn.max() else 0):
        yield f"turn {turn + 1}", tokens.turn == turn
    yield "first of a later turn", (tokens.turn > 0) & (tokens.turn_offset == 0)
    yield "later contexts", tokens.context > 0


def _between(values: Integers, low: int, high: int) -> Mask:
    return np.asarray((values >= low) & (values <= high))


def sums(tokens: Tokens, stops: Sequence[int]) -> list[Statement]:
    """All functions over all selections."""
    chosen = dict(selections(tokens))
    found = []
    for what, differences in functions(tokens, stops).items():
        for which, mask in chosen.items():
            one = sum_of(f"{what}: {which}", differences, mask)
            if one is not None:
                found.append(one)
    return found


def intervals(tokens: Tokens, *, by_probability: bool) -> tuple[Doubles, Doubles]:
    """`[N]` part of (0, 1) that makes the token, in the order of ids or from the most probable on.

    The latter is how engines turn a uniform number into a token, ties aside.
    """
    p = tokens.probabilities
    own = np.take_along_axis(p, tokens.token[:, None], 1)[:, 0]
    if by_probability:
        above = np.where(p > own[:, None], p, 0.0).sum(1)
        ids = np.arange(p.shape[1])[None, :]
        above += np.where((p == own[:, None]) & (ids < tokens.token[:, None]), p, 0.0).sum(1)
    else:
        above = p.cumsum(1)[np.arange(len(own)), tokens.token] - own
    return above, np.minimum(above + own, 1.0)


def transforms(tokens: Tokens, seed: int, *, by_probability: bool) -> Doubles:
    """`[N]` randomised probability integral transforms: independent and uniform if all is right."""
    low, high = intervals(tokens, by_probability=by_probability)
    return low + np.random.default_rng(seed).random(len(low)) * (high - low)


def uniformity(tokens: Tokens, seed: int) -> list[Statement]:
    """Transforms fill equal parts of (0, 1) alike."""
    found = []
    chosen = [("all", np.ones(len(tokens), np.bool_))]
    chosen += [(f"after a token {m.name.lower()}", tokens.before == m) for m in Provenance]
    for order in (False, True):
        values = transforms(tokens, seed, by_probability=order)
        for which, mask in chosen:
            if (n := int(mask.sum())) < 50 * _BINS:
                continue
            counts = np.histogram(values[mask], _BINS, (0, 1))[0]
            statistic = float(((counts - n / _BINS) ** 2).sum() / (n / _BINS))
            p = float(chi2.sf(statistic, _BINS - 1))
            name = "from the most probable on" if order else "by id"
            worst = float(np.abs(counts * _BINS / n - 1).max())
            found.append(Statement(f"transforms uniform, {name}: {which}", n, statistic, p, worst))
    return found
