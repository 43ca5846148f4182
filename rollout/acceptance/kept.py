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
"""How far listed probabilities may miss a whole before the arrays are taken to be mixed up."""


class _TopKLists(Protocol):
    """What `KeptTokens` and `Score` have in common."""

    @property
    def logprobs(self) -> FloatArray: ...
    @property
    def topk_ids(self) -> IntArray: ...
    @property
    def topk_logprobs(self) -> FloatArray: ...


@dataclass(frozen=True, slots=True)
class TopKDistributions:
    """What is known of a distribution at each of N positions, all after temperature and top-p."""

    logprobs: FloatArray
    """`[N]` log-probability of the token that stands there."""
    topk_ids: IntArray
    """`[N, K]` the most probable ids, each once, padded with -1. Chosen without a look at the
    token that stands there, also where probabilities are equal."""
    topk_logprobs: FloatArray
    """`[N, K]` padded with -inf."""

    @classmethod
    def concatenate(cls, parts: Sequence[_TopKLists]) -> TopKDistributions:
        """The positions of several `KeptTokens` or `Score`, one after the other."""
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
    """What becomes of each of B rows of kept tokens."""

    accepted: IntArray
    """`[B]` leading tokens kept. From now on they follow the current policy."""
    token: IntArray
    """`[B]` the token to place after them; -1 where the whole row was accepted: just draw on."""
    logprob: FloatArray
    """`[B]` log p(token), of the current policy, not of the residual; nan where token is -1."""


def verify_kept(
    tokens: ArrayLike,
    drawn: TopKDistributions,
    now: TopKDistributions,
    *,
    tail_ids: ArrayLike,
    tail_logprobs: ArrayLike,
    offsets: ArrayLike,
    uniforms: ArrayLike,
    block: bool = True,
) -> Verdicts:
    """Keep a prefix of tokens that were *never trained on*, so that all follows the new policy.

    Let q be the distribution that a token x was drawn from, p the current one, both given the
    tokens before it, and A = topK(q) & topK(p), fixed without looking at x; q_A is q on A and 0
    elsewhere.

    Token by token (`block=False`): accept x with min(1, p(x)/q(x)) if x is in A, else not at all;
    at the first rejection draw from the residual, p - min(p, q_A) rescaled.

    By block (`block=True`): weights w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q_A(x_i)), 0 outside A.
    Each i is a place to end with probability h_i = s_i / (s_i + 1 - w_i), where
    s_i = sum_y max(w_i p(y) - q_A(y), 0) at the position after x_i; h = w at a row's end. The
    longest one wins; there the next token is drawn from max(w_i p - q_A, 0), rescaled. This is
    block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2) with q_A for the drafter.

    Both are exact given everything that has happened, and keep a token x_1 .. x_i with a
    probability that is never smaller by block. Proofs: docs/exactness.md. What q_A leaves out is
    lost as speed. Residual outside topK(p) is p there; `tail_ids` are draws from it.

    Where a residual vanishes by rounding, its place was reached by rounding as well (probability
    about 1e-7); then the token is drawn from p.

    Args:
        tokens: `[N]` the kept tokens x, row after row.
        drawn: q. A token that is missing from its own top-K is rejected, whatever is known of it.
        now: p, at the same positions. Its K may be another one.
        tail_ids: `[N]` a fresh draw at each position from p outside now.topk_ids; -1: no mass.
            A caller with all of p at hand may give any id that is listed nowhere, and draw only
            where that id is the verdict.
        tail_logprobs: `[N]` its log-probability in all of p; -inf where it is not drawn yet.
        offsets: `[B+1]` row i holds tokens[offsets[i] : offsets[i+1]]; it may be empty.
        uniforms: `[N, 2]` fresh numbers in [0, 1), independent of those that drew the tokens.
        block: see above.

    Raises:
        TypeError: tokens, ids or offsets are no integers.
        ValueError: shapes do not fit together, or p is no distribution: log-probabilities that are
            nan, whose listed part and tail do not add up, a tail draw that is listed.
    """
    kept, starts = int32_values("tokens", tokens), int32_values("offsets", offsets)
    check_offsets("verify_kept", starts, len(kept))
    numbers = np.ascontiguousarray(uniforms, np.float64)
    if numbers.shape != (len(kept), 2):
        raise ValueError(f"verify_kept: uniforms must be {(len(kept), 2)}, not {numbers.shape}")
    q_ids, q_logprobs = _lists("drawn", drawn, len(kept))
    p_ids, p_logprobs = _lists("now", now, len(kept))
    tails = int32_values("tail_ids", tail_ids, minimum=-1)
    tail_values = np.asarray(tail_logprobs, np.float64)
    rest = _outside(p_ids, p_logprobs, tails, tail_values)
    # An id of -1 has no mass, whatever stands beside it.
    laws = _Laws(
        q_ids, np.exp(q_logprobs), p_ids, np.where(p_ids >= 0, np.exp(p_logprobs), 0.0), rest
    )
    accepted = np.zeros(len(starts) - 1, np.int32)
    places = np.full(len(starts) - 1, -1, np.int32)
    _verify(kept, laws, starts, numbers, block, accepted, places)
    placed = np.flatnonzero(places >= 0)
    at, place = (starts[:-1] + accepted)[placed], places[placed]
    token, logprob = np.full_like(places, -1), np.full(len(places), np.nan, np.float32)
    token[placed] = np.concatenate([p_ids, tails[:, None]], axis=1)[at, place]
    logprob[placed] = np.concatenate([p_logprobs, tail_values[:, None]], axis=1)[at, place]
    return Verdicts(accepted, token, logprob)


def accept_lenient(
    drawn: ArrayLike, now: ArrayLike, offsets: ArrayLike, uniforms: ArrayLike, lenience: float
) -> IntArray:
    """SPEC-RL's published rule (arXiv 2509.23232): accept with min(1, l p/q), then just draw on.

    **Biased**, also at lenience 1: after a rejection the next token is drawn from p instead of the
    residual, so tokens that p likes less than q did come too often. See docs/exactness.md.

    Args:
        drawn: `[N]` log q(x) of each kept token.
        now: `[N]` log p(x) of the same.
        offsets: `[B+1]` row i holds the tokens offsets[i] .. offsets[i+1] - 1.
        uniforms: `[N]` fresh numbers in [0, 1).
        lenience: l > 0; the larger, the more is kept and the less the samples follow p.

    Returns:
        `[B]` leading tokens kept.

    Raises:
        ValueError: shapes do not fit together, a nan, or lenience is not positive.
    """
    starts = int32_values("offsets", offsets)
    q, p = np.asarray(drawn, np.float64), np.asarray(now, np.float64)
    numbers = np.asarray(uniforms, np.float64)
    check_offsets("accept_lenient", starts, len(q))
    if not q.shape == p.shape == numbers.shape == (len(q),):
        raise ValueError(
            f"accept_lenient: {len(q)} tokens need as many log-probabilities and uniforms, "
            f"not {p.shape} and {numbers.shape}"
        )
    if not lenience > 0 or np.isnan(q).any() or np.isnan(p).any():
        raise ValueError(f"accept_lenient: a nan, or a lenience that is not positive ({lenience})")
    if np.isneginf(q).any():
        raise ValueError("accept_lenient: a kept token had probability 0 when it was drawn")
    rejected = numbers >= lenience * np.exp(np.minimum(p - q, 700.0))
    before = np.concatenate([[0], np.cumsum(rejected)])
    inside = before[1:] - np.repeat(before[starts[:-1]], np.diff(starts)) == 0
    counts = np.concatenate([[0], np.cumsum(inside)])
    return np.asarray(counts[starts[1:]] - counts[starts[:-1]], np.int32)


def _lists(name: str, known: TopKDistributions, total: int) -> tuple[IntArray, Doubles]:
    """Checked ids and log-probabilities, as compiled code takes them."""
    ids, logprobs = np.asarray(known.topk_ids), np.asarray(known.topk_logprobs)
    if ids.ndim != 2 or len(ids) != total or logprobs.shape != ids.shape:
        raise ValueError(
            f"verify_kept: {name} needs top-K of shape ({total}, K), "
            f"not {ids.shape} and {logprobs.shape}"
        )
    values = np.ascontiguousarray(logprobs, np.float64)
    if np.isnan(values).any():
        raise ValueError(f"verify_kept: {name} holds log-probabilities that are nan")
    flat = int32_values(f"{name}.topk_ids", ids.reshape(-1), minimum=-1)
    return flat.reshape(ids.shape), values


def _outside(ids: IntArray, logprobs: Doubles, tail_ids: IntArray, tail: Doubles) -> Doubles:
    """`[N]` mass of p outside its list. Raises ValueError where list and tail contradict."""
    if len(tail_ids) != len(ids) or tail.shape != tail_ids.shape:
        raise ValueError(
            f"verify_kept: {len(ids)} tokens need as many tail draws, "
            f"not {tail_ids.shape} and {tail.shape}"
        )
    listed = np.where(ids >= 0, np.exp(logprobs), 0.0).sum(axis=1)
    there = tail_ids >= 0
    own = np.where(there, np.exp(tail), 0.0)
    gap = 1.0 - listed
    bad = ~(own <= gap + _TOLERANCE) | (~there & (gap > _TOLERANCE))
    bad |= ((ids == tail_ids[:, None]) & there[:, None]).any(axis=1)
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(
            f"verify_kept: position {at} of p lists {ids[at]} with {listed[at]:.4f} in all and has "
            f"{tail_ids[at]} with {own[at]:.4g} as a draw from outside: that is no distribution"
        )
    # A sum of float32 values is off by some 1e-7; the tail holds its own draw at the least.
    return np.where(there, np.maximum(gap, own), 0.0)


class _Laws(NamedTuple):
    """q and p in lists, as compiled code takes them: probabilities, not logarithms."""

    q_ids: IntArray
    q: Doubles
    p_ids: IntArray
    p: Doubles
    rest: Doubles
    """`[N]` mass of p outside its list."""


@kernel
def _find(ids: IntArray, wanted: int) -> int:
    """The place of an id in a short list, -1 where it is missing."""
    for place in range(len(ids)):
        if ids[place] == wanted and wanted >= 0:
            return place
    return -1


@kernel
def _left(laws: _Laws, at: int, place: int, w: float) -> float:
    """max(w p - q_A, 0) of one listed token."""
    if laws.p_ids[at, place] < 0:
        return 0.0
    twin = _find(laws.q_ids[at], laws.p_ids[at, place])
    known = laws.q[at, twin] if twin >= 0 else 0.0
    return float(max(w * laws.p[at, place] - known, 0.0))


@kernel
def _residual(laws: _Laws, at: int, w: float) -> float:
    """The residual's mass, sum over all y of max(w p - q_A, 0)."""
    total = w * laws.rest[at]
    for place in range(laws.p_ids.shape[1]):
        total += _left(laws, at, place, w)
    return float(total)


@kernel
def _ratio(laws: _Laws, at: int, x: int) -> float:
    """p(x) / q(x) for x in A, else 0. Both from the lists, as the residual takes them."""
    in_q, in_p = _find(laws.q_ids[at], x), _find(laws.p_ids[at], x)
    if in_q < 0 or in_p < 0 or laws.q[at, in_q] <= 0.0:
        return 0.0
    return float(laws.p[at, in_p] / laws.q[at, in_q])


@kernel
def _place(laws: _Laws, at: int, w: float, u: float) -> int:
    """Draw from the residual: a place in p's list, or its width for the tail."""
    width = laws.p_ids.shape[1]
    total = _residual(laws, at, w)
    vanished = total <= 0.0
    if vanished:
        total = laws.rest[at] + laws.p[at].sum()
    target, last = u * total, width
    for place in range(width):
        mass = laws.p[at, place] if vanished else _left(laws, at, place, w)
        if mass > 0.0:
            last = place
            if target < mass:
                return place
        target -= mass
    return width if laws.rest[at] > 0.0 else int(last)


@kernel
def _verify(
    tokens: IntArray,
    laws: _Laws,
    offsets: IntArray,
    uniforms: Doubles,
    block: bool,
    accepted: IntArray,
    places: IntArray,
) -> None:
    """Fill `accepted`, and `places` with one in p's list, its width for the tail, or -1."""
    for row in range(len(offsets) - 1):
        start, end = offsets[row], offsets[row + 1]
        w = weight = 1.0
        for at in range(start, end):
            ratio = _ratio(laws, at, tokens[at])
            if block:
                w = min(1.0, w * ratio)
                chance = w
                if 0.0 < w < 1.0 and at + 1 < end:
                    left = _residual(laws, at + 1, w)
                    chance = left / (left + 1.0 - w)
            else:
                chance = ratio
            if uniforms[at, 0] < chance:
                accepted[row] = at + 1 - start
                weight = w
            elif w <= 0.0 or not block:
                break
        at = start + accepted[row]
        if at < end:
            places[row] = _place(laws, at, weight, uniforms[at, 1])
