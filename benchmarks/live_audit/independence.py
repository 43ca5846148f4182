"""Whether samples are independent: shared random numbers, and texts that come again.

If all tokens are draws of their distributions, the randomised transforms of a run are independent
uniform numbers. Those of places that would share a random number, if a seed were used twice, must
not correlate: siblings at the same place, neighbouring groups, two turns, two contexts, two visits
of a prompt. And given everything earlier, a token equals what followed the same prefix before as
often as its distribution says.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import norm

from benchmarks.live_audit.statements import (
    Statement,
    intervals,
    of_mass,
    sum_of,
    transforms,
    two_sided,
)
from benchmarks.live_audit.tokens import Doubles, Tokens

MAX_SEQUENCES = 3000
"""Of which all pairs are compared."""
_SHARED = 0.8
"""Weight of "the same number" in the likelihood ratio of two tokens; the rest is "another"."""
MIN_PAIRS = 200
Key = tuple[int, ...]


def correlations(tokens: Tokens, seed: int, groups_per_step: int) -> list[Statement]:
    """Of normal scores at places that a reused seed would give the same number."""
    scores = norm.ppf(np.clip(transforms(tokens, seed, by_probability=True), 1e-12, 1 - 1e-12))
    keys, turns = (
        list(
            zip(*(getattr(tokens, one).tolist() for one in ("group", "index", *place)), strict=True)
        )
        for place in (("context", "offset"), ("turn", "turn_offset"))
    )
    earlier = _previous_visit(tokens)
    found = [_siblings(tokens, scores)]

    def pair(name: str, of: Sequence[Key], other: Callable[[Key], Key | None]) -> None:
        where = {key: i for i, key in enumerate(of)}
        pairs = [
            (i, j) for i, key in enumerate(of) if (j := where.get(other(key) or ())) is not None
        ]
        if len(pairs) >= MIN_PAIRS:
            first, second = np.array(pairs).T
            z = float((scores[first] * scores[second]).sum()) / math.sqrt(len(pairs))
            effect = z / math.sqrt(len(pairs))
            found.append(Statement(f"correlation: {name}", len(pairs), z, two_sided(z), effect))

    pair("neighbouring groups", keys, lambda k: (k[0] - 1, *k[1:]))
    pair("neighbouring groups and samples", keys, lambda k: (k[0] - 1, k[1] - 1, *k[2:]))
    pair("the same place of the step before", keys, lambda k: (k[0] - groups_per_step, *k[1:]))
    pair("visits of a prompt", keys, lambda k: (earlier[k[0]], *k[1:]) if k[0] in earlier else None)
    pair("contexts of a sample", keys, lambda k: (k[0], k[1], k[2] - 1, k[3]))
    pair("turns of a sample", turns, lambda k: (k[0], k[1], k[2] - 1, k[3]))
    pair("one token before", keys, lambda k: (*k[:3], k[3] - 1))
    pair("two tokens before", keys, lambda k: (*k[:3], k[3] - 2))
    pair("a sibling's token before", keys, lambda k: (k[0], k[1] - 1, k[2], k[3] - 1))
    return [one for one in found if one is not None]


def _siblings(tokens: Tokens, scores: Doubles) -> Statement | None:
    """All pairs of a group at one place: sum of z_i z_j over i < j."""
    key = (tokens.group * 1000 + tokens.context) * 100_000 + tokens.offset
    _, where = np.unique(key, return_inverse=True)
    total, squares = np.bincount(where, scores), np.bincount(where, scores**2)
    count = np.bincount(where)
    pairs = float((count * (count - 1) / 2).sum())
    if pairs < MIN_PAIRS:
        return None
    z = float(((total**2 - squares) / 2).sum()) / math.sqrt(pairs)
    name = "correlation: siblings at one place"
    return Statement(name, int(pairs), z, two_sided(z), z / math.sqrt(pairs))


def _previous_visit(tokens: Tokens) -> dict[int, int]:
    """By group, the group that had its prompt before: the key of texts is the prompt itself."""
    seen: dict[int, int] = {}
    earlier = {}
    prompts = dict(zip(tokens.group.tolist(), tokens.prompt.tolist(), strict=True))
    for group in sorted(prompts):
        if prompts[group] in seen:
            earlier[group] = seen[prompts[group]]
        seen[prompts[group]] = group
    return earlier


def repetitions(tokens: Tokens) -> list[Statement]:
    """A token is one of those that followed the same prefix before, as often as the policy says.

    "Before" is in samples of earlier steps that were trained on, and in earlier siblings.
    """
    found = []
    for name, known in (
        ("an earlier visit", _continuations(tokens, of_siblings=False)),
        ("an earlier sibling", _continuations(tokens, of_siblings=True)),
    ):
        chosen = np.array([bool(one) for one in known])
        mass = np.array(
            [
                p[list(one)].sum() if one else 0.0
                for p, one in zip(tokens.probabilities, known, strict=True)
            ]
        )
        hit = np.array([t in one for t, one in zip(tokens.token.tolist(), known, strict=True)])
        differences = of_mass(hit, np.minimum(mass, 1.0))
        for which, mask in (
            ("all", chosen),
            ("first token of a response", chosen & (tokens.offset == 0)),
            ("policy unsure", chosen & (tokens.probabilities.max(1) < 0.6)),
        ):
            one = sum_of(f"repeats {name}: {which}", differences, mask)
            if one is not None:
                found.append(one)
    return found


def _continuations(tokens: Tokens, *, of_siblings: bool) -> list[frozenset[int]]:
    """`[N]` the tokens that followed the same prefix in earlier siblings, or in earlier steps."""
    after: defaultdict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    found = []
    columns = (tokens.prefix, tokens.token, tokens.step, tokens.group, tokens.index)
    for prefix, token, step, group, index in zip(*(one.tolist() for one in columns), strict=True):
        known = after[prefix]
        if of_siblings:
            counted = (t for t, _, other, place in known if other == group and place < index)
        else:
            counted = (t for t, earlier, _, _ in known if earlier < step)
        found.append(frozenset(counted))
        known.append((token, step, group, index))
    return found


def shared_numbers(tokens: Tokens) -> Statement:
    """Whether any two contexts were drawn with the same random numbers, place by place.

    For each pair the product over places of (likelihood of the two tokens with one number for
    both) / (with one for each), mixed with 1 - `_SHARED` of 1, has mean at most 1 if numbers are
    independent. So the largest of M products is above M / p with probability at most p.
    """
    low, high = intervals(tokens, by_probability=True)
    numbers = tokens.sample * 1000 + tokens.context
    chosen, where = np.unique(numbers, return_inverse=True)
    inside = where < MAX_SEQUENCES
    count, width = min(len(chosen), MAX_SEQUENCES), int(tokens.offset.max()) + 1
    lows, highs = np.full((count, width), np.nan), np.full((count, width), np.nan)
    at = where[inside], tokens.offset[inside]
    lows[at], highs[at] = low[inside], high[inside]
    most = -np.inf
    for i in range(count - 1):
        most = max(most, float(_ratios(lows, highs, i).max()))
    pairs = count * (count - 1) // 2
    p = min(1.0, math.exp(min(0.0, math.log(max(1, pairs)) - most)))
    return Statement("any two contexts share random numbers", pairs, most, p, most)


def _ratios(lows: Doubles, highs: Doubles, i: int) -> Doubles:
    """Log of the product, of context i with each later one."""
    both = np.minimum(highs[i], highs[i + 1 :]) - np.maximum(lows[i], lows[i + 1 :])
    alone = (highs[i] - lows[i]) * (highs[i + 1 :] - lows[i + 1 :])
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.log(_SHARED * np.maximum(both, 0.0) / np.maximum(alone, 1e-300) + 1 - _SHARED)
    return np.asarray(np.where(np.isnan(ratio), 0.0, ratio).sum(1))
