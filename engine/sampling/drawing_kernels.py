"""Draws on a CPU (`engine.sampling.drawing`): one pass over a row finds its K most probable tokens.

Only blocks whose largest value reaches the K-th largest so far are looked at token by token. The
noise of tokens outside the list is computed for the few rows that need it, and only for tokens that
can still win.
"""

import math

import numpy as np
from numpy.typing import NDArray

from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray, IntArray, SeedArray

kernel = kernels_of("engine")

_BLOCK = 64
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_11, _14, _27, _30, _31, _32 = (np.uint64(bits) for bits in (11, 14, 27, 30, 31, 32))
_LOW = np.uint64(0xFFFFFFFF)
_GOLDEN = np.uint32(0x9E3779B9)
_MURMUR_1 = np.uint32(0x85EBCA6B)
_MURMUR_2 = np.uint32(0xC2B2AE35)
_S13, _S16 = np.uint32(13), np.uint32(16)
_NOISE_BLOCK = 256


@kernel.released
def draw_rows(
    logprobs: FloatArray,
    rows: NDArray[np.int64],
    seeds: SeedArray,
    positions: NDArray[np.int64],
    noise_seeds: SeedArray,
    tokens: NDArray[np.int64],
    own: FloatArray,
    ids: IntArray,
    values: FloatArray,
) -> None:
    """List the most probable tokens of some rows and draw a token of each.

    A row of `logprobs` `[R, V]` is changed and restored; `rows`, `seeds`, `positions` and
    `noise_seeds` are `[N]`. Filled are `tokens` `[N]` and `own`, their log-probabilities (-1 and
    nan if the row is not finite), and the lists `ids` and `values` `[N, K]`, padded with -1 and
    -inf.
    """
    k = ids.shape[1]
    order = np.empty(k, np.int64)
    for n in range(len(rows)):
        row = logprobs[rows[n]]
        found = _most_probable(row, ids[n], values[n])
        tokens[n], own[n] = -1, np.nan
        if found == 0:
            continue
        place = _symbol(ids[n], values[n], found, _uniform(seeds[n], positions[n]), order)
        if place < 0:
            tokens[n] = _identity(row, ids[n], _stream_bits(noise_seeds[n], positions[n]))
            if tokens[n] < 0:  # nothing is outside: the tail was rounding
                place = order[found - 1]
        if place >= 0:
            tokens[n] = ids[n, place]
        own[n] = row[tokens[n]]


@kernel.released
def list_rows(
    logprobs: FloatArray, rows: NDArray[np.int64], ids: IntArray, values: FloatArray
) -> None:
    """List the most probable tokens of some rows, as `draw_rows` does."""
    for n in range(len(rows)):
        _most_probable(logprobs[rows[n]], ids[n], values[n])


@kernel.released
def identify_rows(
    logprobs: FloatArray,
    rows: NDArray[np.int64],
    ids: IntArray,
    positions: NDArray[np.int64],
    noise_seeds: SeedArray,
    tokens: NDArray[np.int64],
) -> None:
    """Fill `tokens` `[N]` with the token outside each list that noise names; -1: none has mass.

    `logprobs` is `[R, V]`; a row is changed and restored. `ids` `[N, K]` is padded with -1.
    """
    for n in range(len(rows)):
        tokens[n] = _identity(logprobs[rows[n]], ids[n], _stream_bits(noise_seeds[n], positions[n]))


@kernel.of_maxima
def _maximum(values: FloatArray) -> float:
    most = values[0]
    for value in values:
        most = max(most, value)
    return float(most)


@kernel.released
def _most_probable(row: FloatArray, ids: IntArray, values: FloatArray) -> int:
    """Fill a row's list, most probable first, then by id; return its length."""
    k, found = len(ids), 0
    ids[:], values[:] = -1, -np.inf
    if k == 0:
        return 0
    for start in range(0, len(row), _BLOCK):
        block = row[start : start + _BLOCK]
        if found == k and not _maximum(block) > values[k - 1]:
            continue
        for offset in range(len(block)):
            value = block[offset]
            if value > values[k - 1]:
                found = min(found + 1, k)
                at = found - 1
                while at > 0 and values[at - 1] < value:
                    values[at], ids[at] = values[at - 1], ids[at - 1]
                    at -= 1
                values[at], ids[at] = value, start + offset
    if found == 0:  # not finite
        values[0] = np.nan
    return found


@kernel.released
def _symbol(
    ids: IntArray, values: FloatArray, found: int, number: float, order: NDArray[np.int64]
) -> int:
    """Return the place of the listed token at `number` of the cumulative mass; -1: tail.

    The mass is summed in the order of ids, which rounding cannot change.
    """
    for at in range(found):
        place = at
        while place > 0 and ids[order[place - 1]] > ids[at]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = at
    total = 0.0
    for at in range(found):
        total += math.exp(values[at])
    target = number * max(total, 1.0 if found == len(ids) else total)
    for at in range(found):
        target -= math.exp(values[order[at]])
        if target < 0.0:
            return int(order[at])
    return -1


@kernel.released
def _identity(row: FloatArray, ids: IntArray, noise: np.uint64) -> int:
    """Return the token outside `ids` with the largest log p - log E, E exponential noise."""
    size = len(ids)
    held = np.empty(size, np.float32)
    for at in range(size):
        if ids[at] >= 0:
            held[at] = row[ids[at]]
            row[ids[at]] = -np.inf
    token = _winner(row, noise)
    for at in range(size):
        if ids[at] >= 0:
            row[ids[at]] = held[at]
    return token


@kernel.released
def _winner(row: FloatArray, noise: np.uint64) -> int:
    most = float(_maximum(row))
    if not most > -np.inf:
        return -1
    low, high = np.uint32(noise & _LOW), np.uint32(noise >> _32)
    bits = np.empty(_NOISE_BLOCK, np.uint32)
    first = 0
    while row[first] != most:
        first += 1
    _noise_bits(first, 1, low, high, bits)
    winner, best = first, most - math.log(_exponential(bits[0], noise, first))
    limit = _limit(most - best)
    for start in range(0, len(row), _NOISE_BLOCK):
        count = min(_NOISE_BLOCK, len(row) - start)
        if _noise_bits(start, count, low, high, bits) > limit:
            continue
        for offset in range(count):
            token = start + offset
            if bits[offset] <= limit and token != first:
                score = row[token] - math.log(_exponential(bits[offset], noise, token))
                if score > best:
                    best, winner = score, token
                    limit = _limit(most - best)
    return winner


@kernel.released
def _limit(lead: float) -> np.uint32:
    """Largest noise bits that can win: E >= v, so it must be that v < exp(lead)."""
    return np.uint32(min(math.exp(min(lead, 0.0)) * 2.0**32, 2.0**32 - 1.0))


@kernel.of_maxima
def _noise_bits(
    start: int, count: int, low: np.uint32, high: np.uint32, out: NDArray[np.uint32]
) -> int:
    """Write the first 32 bits of the noise of tokens start .. start + count - 1; return the least.

    The hash of the token and the two halves of a random key is MurmurHash3's finalizer with the
    upper half added in its middle, so that the noise of one key is not that of another one shifted.
    """
    least = np.uint32(0xFFFFFFFF)
    for at in range(count):
        z = np.uint32(np.uint32(np.uint32(start + at) * _GOLDEN) + low)
        z = np.uint32(z ^ np.uint32(z >> _S16))
        z = np.uint32(np.uint32(z * _MURMUR_1) + high)
        z = np.uint32(z ^ np.uint32(z >> _S13))
        z = np.uint32(z * _MURMUR_2)
        z = np.uint32(z ^ np.uint32(z >> _S16))
        out[at] = z
        least = min(least, z)
    return int(least)


@kernel.released
def _uniform(seed: np.uint64, position: int) -> float:
    return (float(_stream_bits(seed, position) >> _14) + 0.5) * 2.0**-50


@kernel.released
def _stream_bits(seed: np.uint64, position: int) -> np.uint64:
    return _mix(_mix(seed + _GAMMA) + np.uint64(position + 1) * _GAMMA)


@kernel.released
def _mix(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> _30)) * _MIX_1
    z = (z ^ (z >> _27)) * _MIX_2
    return z ^ (z >> _31)


@kernel.released
def _exponential(bits: np.uint32, noise: np.uint64, token: int) -> float:
    """Return exponential noise, -log(1 - v), from the first 32 bits of v and 53 more."""
    more = _mix(noise + np.uint64(token + 1) * _GAMMA) >> _11
    return -math.log1p(-(float(bits) + (float(more) + 0.5) * 2.0**-53) * 2.0**-32)
