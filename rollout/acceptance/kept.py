"""Verification of tokens drawn under an older policy against the current one."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from asyncrl.rollout.jit import check_offsets, int32_values, kernels_of
from asyncrl.rollout.trajectory import IntArray

kernel = kernels_of("rollout/acceptance")

Doubles = NDArray[np.float64]

MASS_TOLERANCE = 0.01
"""Amount by which the probabilities of a list may exceed 1 before the arrays are refused."""


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The outcome of verification for each of B rows of kept tokens."""

    accepted: IntArray
    """`[B]` leading tokens that stay as they are. They follow the current policy now."""
    symbol: IntArray
    """`[B]` symbol of the token to append after them: its place in the list, K for the tail; -1 if
    the whole row was accepted, so that generation simply continues."""
    renamed: NDArray[np.bool_]
    """`[B]` True if the token to append is the tail token that stood there, under its new identity.
    A tail symbol that is not renamed is drawn outside the list, with fresh noise."""


def verify_kept(
    symbols: ArrayLike,
    behaviour: ArrayLike,
    current: ArrayLike,
    *,
    offsets: ArrayLike,
    uniforms: ArrayLike,
    renamed: ArrayLike | None = None,
    block: bool = True,
) -> Verdicts:
    """Accept a prefix of tokens that were *never trained on*, so that all follow the new policy.

    At each position a list of K tokens was fixed before the token there was drawn. The *symbol* of
    a token is its place in that list, or K, the tail, for all tokens outside. Let q be the
    distribution of the symbol that the token was drawn from and p that of the current policy, both
    given the tokens before it; q and p of the tail are what their lists leave. Within the tail, the
    identity of a token is a function of the distribution and of noise that belongs to the position
    (`engine.sampling.drawing`). Where the current policy makes another token of the same noise, the
    token is *renamed*: the row ends with the new token, and what followed the old one is not
    judged.

    Token by token (`block=False`): accept symbol x with probability min(1, p(x)/q(x)). At the first
    rejection draw a symbol from the residual, p - min(p, q), rescaled.

    By block (`block=True`): weights w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)). Each i holds
    with probability h_i = s_i / (s_i + 1 - w_i), where s_i = sum_y max(w_i p(y) - q(y), 0) over the
    K + 1 symbols at the position after x_i; h = w at a row's end. Accept up to the largest i that
    holds, and draw the next symbol from max(w_i p - q, 0), rescaled. This is block verification
    (Sun et al. 2024, arXiv 2403.10444, algorithm 2) over symbols.

    Both rules are exact given everything that has happened; by block, a prefix is accepted at least
    as often. Proofs: docs/exactness.md. Where a residual vanishes by rounding, its position was
    reached by rounding too (probability about 1e-7); the symbol is then drawn from p.

    Args:
        symbols: `[N]` of the kept tokens, row after row, 0 to K.
        behaviour: `[N, K]` log q of the listed tokens at each position, -inf for padding.
        current: `[N, K]` log p of the same tokens.
        offsets: `[B+1]` row i holds symbols[offsets[i] : offsets[i+1]]; it may be empty.
        uniforms: `[N, 2]` fresh numbers in [0, 1), independent of those that drew the tokens.
        renamed: `[N]` whether a tail token is renamed; None: none is.
        block: see above.

    Raises:
        TypeError: symbols or offsets are not integers.
        ValueError: shapes do not fit together, a symbol is outside 0 .. K, or a list is not part of
            a distribution: a log-probability is nan, or the list has more mass than 1.
    """
    kept = int32_values("verify_kept: symbols", symbols, minimum=0)
    starts = int32_values("offsets", offsets)
    check_offsets("verify_kept", starts, len(kept))
    numbers = np.ascontiguousarray(uniforms, np.float64)
    if numbers.shape != (len(kept), 2):
        raise ValueError(f"verify_kept: uniforms must be {(len(kept), 2)}, not {numbers.shape}")
    q = _with_tail("behaviour", behaviour, len(kept))
    p = _with_tail("current", current, len(kept))
    if q.shape != p.shape:
        raise ValueError(
            f"verify_kept: behaviour and current must list the same tokens, not {q.shape[1] - 1} "
            f"and {p.shape[1] - 1} at each position"
        )
    if len(kept) and kept.max() >= q.shape[1]:
        raise ValueError(f"verify_kept: symbols must be at most K = {q.shape[1] - 1}")
    ends = np.zeros(len(kept), np.bool_) if renamed is None else np.asarray(renamed, np.bool_)
    if ends.shape != kept.shape or (ends & (kept != q.shape[1] - 1)).any():
        raise ValueError("verify_kept: renamed must have one value a token, true for the tail only")
    accepted = np.zeros(len(starts) - 1, np.int32)
    symbol = np.full(len(starts) - 1, -1, np.int32)
    _verify(kept, q, p, starts, numbers, ends, block, accepted, symbol)
    last = starts[:-1] + accepted - 1
    new_name = (accepted > 0) & ends[last] if len(kept) else accepted > 0
    accepted[new_name] -= 1
    symbol[new_name] = q.shape[1] - 1
    return Verdicts(accepted, symbol, new_name)


def symbols_of(tokens: IntArray, ids: IntArray) -> IntArray:
    """Return `[N]` places of tokens in their lists of ids `[N, K]`; K for a token outside."""
    listed = ids == tokens[:, None]
    place = listed.argmax(axis=1) if ids.shape[1] else np.zeros(len(tokens), np.int64)
    return np.where(listed.any(axis=1), place, ids.shape[1]).astype(np.int32)


def warm_up_verification() -> None:
    """Compile the rule, or load the compiled code (seconds, once per machine)."""
    half = np.log(np.full((2, 1), 0.5))
    verify_kept([0, 1], half, half, offsets=[0, 2], uniforms=np.zeros((2, 2)))


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


def _with_tail(name: str, logprobs: ArrayLike, total: int) -> Doubles:
    """Return `[N, K + 1]` checked probabilities: the list's, and the remainder."""
    values = np.asarray(logprobs, np.float64)
    if values.ndim != 2 or len(values) != total:
        raise ValueError(
            f"verify_kept: {name} needs log-probabilities of shape ({total}, K), not {values.shape}"
        )
    out = np.empty((total, values.shape[1] + 1))
    np.exp(values, out=out[:, :-1])
    rest = 1.0 - out[:, :-1].sum(axis=1)
    bad = ~(rest >= -MASS_TOLERANCE)
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(
            f"verify_kept: {name} is not part of a distribution at position {at}: its list "
            f"{values[at]} has mass {1.0 - rest[at]:.4f}"
        )
    # Sums of float32 values are off by some 1e-7.
    np.maximum(rest, 0.0, out=out[:, -1])
    return out


@kernel
def _residual(q: Doubles, p: Doubles, at: int, w: float) -> float:
    """Return the residual's mass, sum over all symbols of max(w p - q, 0)."""
    total = 0.0
    for symbol in range(p.shape[1]):
        total += max(w * p[at, symbol] - q[at, symbol], 0.0)
    return total


@kernel
def _draw_residual(q: Doubles, p: Doubles, at: int, w: float, u: float) -> int:
    total = _residual(q, p, at, w)
    vanished = total <= 0.0
    if vanished:
        total = p[at].sum()
    target, last = u * total, 0
    for symbol in range(p.shape[1]):
        mass = p[at, symbol] if vanished else max(w * p[at, symbol] - q[at, symbol], 0.0)
        if mass > 0.0:
            last = symbol
            if target < mass:
                return symbol
        target -= mass
    return last


@kernel
def _verify(
    symbols: IntArray,
    q: Doubles,
    p: Doubles,
    offsets: IntArray,
    uniforms: Doubles,
    renamed: NDArray[np.bool_],
    block: bool,
    accepted: IntArray,
    drawn: IntArray,
) -> None:
    """Fill `accepted` with tokens, renamed ones included, and `drawn` with symbols or -1."""
    for row in range(len(offsets) - 1):
        start, end = offsets[row], offsets[row + 1]
        for at in range(start, end):
            if renamed[at]:
                end = at + 1
                break
        w = weight = 1.0
        for at in range(start, end):
            x = symbols[at]
            ratio = p[at, x] / q[at, x] if q[at, x] > 0.0 else 0.0
            if block:
                w = min(1.0, w * ratio)
                chance = w
                if 0.0 < w < 1.0 and at + 1 < end:
                    residual = _residual(q, p, at + 1, w)
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
            drawn[row] = _draw_residual(q, p, at, weight, uniforms[at, 1])
