"""Tokens drawn under an older policy, judged under the current one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollout.acceptance.jit import kernel
from rollout.arrays import check_offsets, int32_values
from rollout.trajectory import FloatArray, IntArray

Doubles = NDArray[np.float64]

_TOLERANCE = 0.01
"""By how much probabilities may fail to add up to 1 before the arrays are refused."""


class _TopKLists(Protocol):
    """The fields that `KeptTokens` and an engine's `Score` have in common."""

    @property
    def logprobs(self) -> FloatArray: ...
    @property
    def topk_ids(self) -> IntArray: ...
    @property
    def topk_logprobs(self) -> FloatArray: ...


@dataclass(frozen=True, slots=True)
class TopKDistributions:
    """The top-K of a distribution at each of N positions, after temperature and truncation."""

    logprobs: FloatArray
    """`[N]` log-probability of the token at this position of the text."""
    topk_ids: IntArray
    """`[N, K]` the most probable ids, each once, padded with -1. They must be chosen without
    looking at the token of the text, also where probabilities are equal."""
    topk_logprobs: FloatArray
    """`[N, K]` log-probabilities of `topk_ids`, padded with -inf."""

    @classmethod
    def concatenate(cls, parts: Sequence[_TopKLists]) -> TopKDistributions:
        """Concatenate the positions of several `KeptTokens` or `Score`; pads K to the widest."""
        width = max((part.topk_ids.shape[1] for part in parts), default=0)
        total = sum(len(part.logprobs) for part in parts)
        ids = np.full((total, width), -1, np.int32)
        values = np.full((total, width), -np.inf, np.float32)
        at = 0
        for part in parts:
            n, k = part.topk_ids.shape
            ids[at : at + n, :k] = part.topk_ids
            values[at : at + n, :k] = part.topk_logprobs
            at += n
        logprobs = [np.asarray(part.logprobs, np.float32) for part in parts]
        return cls(np.concatenate([np.empty(0, np.float32), *logprobs]), ids, values)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The outcome of verification for each of B rows of kept tokens."""

    accepted: IntArray
    """`[B]` leading tokens accepted. From now on they follow the current policy."""
    token: IntArray
    """`[B]` the token to append after them; -1 where the whole row was accepted, so that
    generation simply continues."""
    logprob: FloatArray
    """`[B]` log p(token) under the current policy, not the residual; nan where token is -1."""


def verify_kept(
    tokens: ArrayLike,
    behaviour: TopKDistributions,
    current: TopKDistributions,
    *,
    tail_ids: ArrayLike,
    tail_logprobs: ArrayLike,
    offsets: ArrayLike,
    uniforms: ArrayLike,
    block: bool = True,
) -> Verdicts:
    """Accept a prefix of tokens that were *never trained on*, so that all follow the new policy.

    Let q be the distribution that a token x was drawn from and p the current one, both given the
    tokens before x. Let A = topK(q) & topK(p), fixed without looking at x; q_A is q on A and 0
    elsewhere.

    Token by token (`block=False`): accept x with probability min(1, p(x)/q(x)) if x is in A, and
    reject it otherwise. At the first rejection draw from the residual, p - min(p, q_A), rescaled.

    By block (`block=True`): weights w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q_A(x_i)), 0 outside A.
    Each i holds with probability h_i = s_i / (s_i + 1 - w_i), where
    s_i = sum_y max(w_i p(y) - q_A(y), 0) at the position after x_i; h = w at a row's end. Accept up
    to the largest i that holds, and draw the next token from max(w_i p - q_A, 0), rescaled. This is
    block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2) with q_A for the drafter.

    Both rules are exact given everything that has happened. By block, a prefix x_1 .. x_i is
    accepted with a probability that is never smaller. Proofs: docs/exactness.md. Mass of q outside
    A costs speed only. Outside topK(p) the residual is p itself; `tail_ids` are draws from it.

    Where a residual vanishes by rounding, its position was reached by rounding too (probability
    about 1e-7); the token is then drawn from p.

    Args:
        tokens: `[N]` the kept tokens x, row after row.
        behaviour: q at each position. A token that is not in its own top-K is rejected.
        current: p at the same positions. Its K may differ.
        tail_ids: `[N]` a fresh draw at each position from p outside current.topk_ids; -1: no mass.
            A caller that has all of p may pass any id that is not listed, and draw only where
            that id is the verdict.
        tail_logprobs: `[N]` log p of `tail_ids`; -inf where the draw is still to be made.
        offsets: `[B+1]` row i holds tokens[offsets[i] : offsets[i+1]]; it may be empty.
        uniforms: `[N, 2]` fresh numbers in [0, 1), independent of those that drew the tokens.
        block: see above.

    Raises:
        TypeError: tokens, ids or offsets are not integers.
        ValueError: shapes do not fit together, or p is not a distribution: a log-probability is
            nan, list and tail do not add up to 1, or a tail draw is listed.
    """
    kept, starts = int32_values("tokens", tokens), int32_values("offsets", offsets)
    check_offsets("verify_kept", starts, len(kept))
    numbers = np.ascontiguousarray(uniforms, np.float64)
    if numbers.shape != (len(kept), 2):
        raise ValueError(f"verify_kept: uniforms must be {(len(kept), 2)}, not {numbers.shape}")
    q_ids, q_logprobs = _lists("behaviour", behaviour, len(kept))
    p_ids, p_logprobs = _lists("current", current, len(kept))
    tails = int32_values("tail_ids", tail_ids, minimum=-1)
    tail_values = np.asarray(tail_logprobs, np.float64)
    rest = _outside(p_ids, p_logprobs, tails, tail_values)
    # Padding (id -1) has no mass, whatever its log-probability says.
    distributions = _Distributions(
        q_ids, np.exp(q_logprobs), p_ids, np.where(p_ids >= 0, np.exp(p_logprobs), 0.0), rest
    )
    accepted = np.zeros(len(starts) - 1, np.int32)
    places = np.full(len(starts) - 1, -1, np.int32)
    _verify(kept, distributions, starts, numbers, block, accepted, places)
    placed = np.flatnonzero(places >= 0)
    at, place = (starts[:-1] + accepted)[placed], places[placed]
    token, logprob = np.full_like(places, -1), np.full(len(places), np.nan, np.float32)
    token[placed] = np.concatenate([p_ids, tails[:, None]], axis=1)[at, place]
    logprob[placed] = np.concatenate([p_logprobs, tail_values[:, None]], axis=1)[at, place]
    return Verdicts(accepted, token, logprob)


def accept_lenient(
    behaviour: ArrayLike,
    current: ArrayLike,
    offsets: ArrayLike,
    uniforms: ArrayLike,
    lenience: float,
) -> IntArray:
    """SPEC-RL's published rule (arXiv 2509.23232): accept with min(1, l p/q), no residual.

    **Biased**, also with lenience 1: after a rejection the next token is drawn from p instead of
    the residual, so tokens that are less likely under p than under q are drawn too often. See
    docs/exactness.md.

    Args:
        behaviour: `[N]` log q(x) of each kept token.
        current: `[N]` log p(x) of the same tokens.
        offsets: `[B+1]` row i holds the tokens offsets[i] .. offsets[i+1] - 1.
        uniforms: `[N]` fresh numbers in [0, 1).
        lenience: l > 0; the larger, the more tokens are accepted and the larger the bias.

    Returns:
        `[B]` leading tokens accepted.

    Raises:
        ValueError: shapes do not fit together, a log-probability is nan, q(x) is 0, or lenience
            is not positive.
    """
    starts = int32_values("offsets", offsets)
    q, p = np.asarray(behaviour, np.float64), np.asarray(current, np.float64)
    numbers = np.asarray(uniforms, np.float64)
    check_offsets("accept_lenient", starts, len(q))
    if not q.shape == p.shape == numbers.shape == (len(q),):
        raise ValueError(
            f"accept_lenient: {len(q)} tokens need as many log-probabilities and uniforms, "
            f"not {p.shape} and {numbers.shape}"
        )
    if not lenience > 0 or np.isnan(q).any() or np.isnan(p).any():
        raise ValueError(
            f"accept_lenient: a log-probability is nan, or lenience is not positive ({lenience})"
        )
    if np.isneginf(q).any():
        raise ValueError("accept_lenient: a kept token had probability 0 when it was drawn")
    rejected = numbers >= lenience * np.exp(np.minimum(p - q, 700.0))
    before = np.concatenate([[0], np.cumsum(rejected)])
    inside = before[1:] - np.repeat(before[starts[:-1]], np.diff(starts)) == 0
    counts = np.concatenate([[0], np.cumsum(inside)])
    return np.asarray(counts[starts[1:]] - counts[starts[:-1]], np.int32)


def _lists(name: str, known: TopKDistributions, total: int) -> tuple[IntArray, Doubles]:
    """Checked ids and log-probabilities for compiled code."""
    ids, logprobs = np.asarray(known.topk_ids), np.asarray(known.topk_logprobs)
    if ids.ndim != 2 or len(ids) != total or logprobs.shape != ids.shape:
        raise ValueError(
            f"verify_kept: {name} needs top-K of shape ({total}, K), "
            f"not {ids.shape} and {logprobs.shape}"
        )
    values = np.ascontiguousarray(logprobs, np.float64)
    if np.isnan(values).any():
        raise ValueError(f"verify_kept: log-probabilities of {name} are nan")
    flat = int32_values(f"{name}.topk_ids", ids.reshape(-1), minimum=-1)
    return flat.reshape(ids.shape), values


def _outside(ids: IntArray, logprobs: Doubles, tail_ids: IntArray, tail: Doubles) -> Doubles:
    """`[N]` mass of p outside its list. Raises ValueError where list and tail do not add up."""
    if len(tail_ids) != len(ids) or tail.shape != tail_ids.shape:
        raise ValueError(
            f"verify_kept: {len(ids)} tokens need as many tail draws, "
            f"not {tail_ids.shape} and {tail.shape}"
        )
    listed = np.where(ids >= 0, np.exp(logprobs), 0.0).sum(axis=1)
    has_tail = tail_ids >= 0
    own = np.where(has_tail, np.exp(tail), 0.0)
    gap = 1.0 - listed
    bad = ~(own <= gap + _TOLERANCE) | (~has_tail & (gap > _TOLERANCE))
    bad |= ((ids == tail_ids[:, None]) & has_tail[:, None]).any(axis=1)
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(
            f"verify_kept: p is not a distribution at position {at}: its list {ids[at]} has mass "
            f"{listed[at]:.4f}, and the tail draw {tail_ids[at]} has probability {own[at]:.4g}"
        )
    # Sums of float32 values are off by some 1e-7; the tail has at least the mass of its draw.
    return np.where(has_tail, np.maximum(gap, own), 0.0)


class _Distributions(NamedTuple):
    """q and p as lists of probabilities, for compiled code."""

    q_ids: IntArray
    """`[N, K]`"""
    q: Doubles
    """`[N, K]`"""
    p_ids: IntArray
    """`[N, K']`"""
    p: Doubles
    """`[N, K']`"""
    rest: Doubles
    """`[N]` mass of p outside its list."""


@kernel
def _find(ids: IntArray, wanted: int) -> int:
    """Index of an id in a short list; -1 if it is missing."""
    for place in range(len(ids)):
        if ids[place] == wanted and wanted >= 0:
            return place
    return -1


@kernel
def _residual_of(distributions: _Distributions, at: int, place: int, w: float) -> float:
    """max(w p - q_A, 0) of one listed token."""
    if distributions.p_ids[at, place] < 0:
        return 0.0
    twin = _find(distributions.q_ids[at], distributions.p_ids[at, place])
    known = distributions.q[at, twin] if twin >= 0 else 0.0
    return float(max(w * distributions.p[at, place] - known, 0.0))


@kernel
def _residual(distributions: _Distributions, at: int, w: float) -> float:
    """The residual's mass, sum over all y of max(w p - q_A, 0)."""
    total = w * distributions.rest[at]
    for place in range(distributions.p_ids.shape[1]):
        total += _residual_of(distributions, at, place, w)
    return float(total)


@kernel
def _ratio(distributions: _Distributions, at: int, x: int) -> float:
    """p(x) / q(x) for x in A, else 0. Both are taken from the lists, as in the residual."""
    in_q, in_p = _find(distributions.q_ids[at], x), _find(distributions.p_ids[at], x)
    if in_q < 0 or in_p < 0 or distributions.q[at, in_q] <= 0.0:
        return 0.0
    return float(distributions.p[at, in_p] / distributions.q[at, in_q])


@kernel
def _draw_residual(distributions: _Distributions, at: int, w: float, u: float) -> int:
    """Draw from the residual; returns an index into p's list, or its width for the tail."""
    width = distributions.p_ids.shape[1]
    total = _residual(distributions, at, w)
    vanished = total <= 0.0
    if vanished:
        total = distributions.rest[at] + distributions.p[at].sum()
    target, last = u * total, width
    for place in range(width):
        mass = distributions.p[at, place] if vanished else _residual_of(distributions, at, place, w)
        if mass > 0.0:
            last = place
            if target < mass:
                return place
        target -= mass
    return width if distributions.rest[at] > 0.0 else int(last)


@kernel
def _verify(
    tokens: IntArray,
    distributions: _Distributions,
    offsets: IntArray,
    uniforms: Doubles,
    block: bool,
    accepted: IntArray,
    places: IntArray,
) -> None:
    """Fill `accepted`, and `places` with what `_draw_residual` drew, or -1 for nothing."""
    for row in range(len(offsets) - 1):
        start, end = offsets[row], offsets[row + 1]
        w = weight = 1.0
        for at in range(start, end):
            ratio = _ratio(distributions, at, tokens[at])
            if block:
                w = min(1.0, w * ratio)
                chance = w
                if 0.0 < w < 1.0 and at + 1 < end:
                    residual = _residual(distributions, at + 1, w)
                    chance = residual / (residual + 1.0 - w)
            else:
                chance = ratio
            if uniforms[at, 0] < chance:
                accepted[row] = at + 1 - start
                weight = w
            elif w <= 0.0 or not block:
                break
        at = start + accepted[row]
        if at < end:
            places[row] = _draw_residual(distributions, at, weight, uniforms[at, 1])
