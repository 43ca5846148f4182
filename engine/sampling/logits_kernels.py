"""The kernels of `asyncrl.engine.sampling.logits_triton`.

Tokens are compared by keys: 32 bits that order floats as integers, then the id, reversed.

Arguments in capitals are compile-time constants. `n` rows, `vocabulary` tokens, `stride` between
rows of logits, `count` parts of a row. `columns` are packed by `engine.sampling.logits_triton`; the
last one maps rows to rows of the logits.

Triton would compile a kernel again, in a step, for seconds, for an `n`, `stride` or `vocabulary`
that is 1 or the first multiple of 16, and for logits at an address that is not one. So the kernels
are not specialized for any of these.
"""

import triton
import triton.language as tl

_LOWEST = tl.constexpr(-(1 << 63))
_HIGHEST = tl.constexpr((1 << 63) - 1)
_IDS = tl.constexpr(0xFFFFFFFF)
_jit = triton.jit(do_not_specialize=["logits", "n", "vocabulary", "stride", "count", "k", "c"])


@_jit
def summarise_kernel(  # type: ignore[no-untyped-def]
    logits, columns, floors, keys, maxima, sums, n, vocabulary, stride, count,
    K: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CUT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Write the largest logit, the sum of exponentials and the K best keys of a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    base = tl.load(columns + 8 * n + row) * stride
    temperature = _real(columns, 4, n, row)
    floor = tl.load(floors + row) if CUT else _LOWEST
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    if K > 0:
        best = tl.full((K,), _LOWEST, tl.int64)
    for block in range(BLOCKS):
        token = (part * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        x = _scaled(logits, base, token, token < vocabulary, temperature)
        key = _key(x, token)
        if CUT:
            x = tl.where((key >= floor) | (x != x), x, -float("inf"))
        top, total = _add(x, top, total)
        if K > 0:
            best = _best(best, tl.where(x > -float("inf"), key, _LOWEST), K)
    at = row * count + part
    tl.store(maxima + at, top)
    tl.store(sums + at, total)
    if K > 0:
        tl.store(keys + at * K + tl.arange(0, K), best)


@_jit
def draw_kernel(  # type: ignore[no-untyped-def]
    logits, columns, floors, keys, maxima, sums, tokens, ids, values, n, vocabulary, stride, count,
    k, K: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, CUT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Join a row's parts; write its list, its token and their log-probabilities."""
    row = tl.program_id(0).to(tl.int64)
    base = tl.load(columns + 8 * n + row) * stride
    top, norm = _norm(maxima, sums, row, count, PARTS)
    finite = (norm == norm) & (tl.abs(norm) < float("inf")) & (tl.abs(top) < float("inf"))
    place = tl.arange(0, PARTS * K)
    held = tl.load(keys + row * count * K + place, mask=place < count * K, other=_LOWEST)
    best = tl.topk(held, K)
    at = tl.arange(0, K)
    valid = (best > _LOWEST) & (at < tl.where(finite, k, 0))
    token = _token(best)
    logprob = (_value(best) - top) - norm
    # The symbol, in the order of ids.
    mass = tl.where(valid, tl.exp(logprob.to(tl.float64)), 0.0)
    before = tl.sum(tl.where(token[None, :] <= token[:, None], mass[None, :], 0.0), axis=1)
    before = tl.where(valid, before, 0.0)
    listed = tl.sum(valid.to(tl.int32), axis=0)
    whole = tl.where(listed == k, 1.0, 0.0).to(tl.float64)
    seed = tl.load(columns + row).to(tl.uint64, bitcast=True)
    position = tl.load(columns + n + row)
    bits = _stream_bits(seed, position) >> 14
    number = (bits.to(tl.int64).to(tl.float64) + 0.5) * 8.881784197001252e-16
    target = number * tl.maximum(tl.max(before, axis=0), whole)
    chosen = tl.min(tl.where(valid & (before > target), token, _IDS), axis=0)
    drawn = tl.where(chosen < _IDS, chosen, tl.max(tl.where(valid, token, -1), axis=0))
    if (chosen == _IDS) & (listed == k):
        noise = tl.load(columns + 2 * n + row).to(tl.uint64, bitcast=True)
        edge = tl.min(tl.where(valid, best, _HIGHEST), axis=0)
        floor = tl.load(floors + row) if CUT else _LOWEST
        name = _name(
            logits, base, vocabulary, _real(columns, 4, n, row), floor, edge, ids, 0, top,
            norm, _stream_bits(noise, position), BLOCK, CUT, False,
        )  # fmt: skip
        drawn = tl.where(name >= 0, name, drawn)
    x = _scaled(logits, base, drawn, drawn >= 0, _real(columns, 4, n, row))
    out = tl.load(columns + 3 * n + row) * (k + 1)
    nothing = float("nan")
    tl.store(tokens + row, tl.where(finite, drawn, -1))
    tl.store(ids + out, tl.where(finite, drawn, 0).to(tl.int32))
    tl.store(values + out, tl.where(finite, (x - top) - norm, nothing))
    tl.store(ids + out + 1 + at, tl.where(valid, token, -1).to(tl.int32), mask=at < k)
    padded = tl.where(valid, logprob, tl.where(finite, -float("inf"), nothing))
    tl.store(values + out + 1 + at, padded, mask=at < k)


@_jit
def look_up_kernel(  # type: ignore[no-untyped-def]
    logits, columns, floors, maxima, sums, ids, values, names, name_values, n, vocabulary, stride,
    count, c, C: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
    CUT: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Join a row's parts; write the log-probabilities of given ids, and the name of its tail."""
    row = tl.program_id(0).to(tl.int64)
    base = tl.load(columns + 8 * n + row) * stride
    top, norm = _norm(maxima, sums, row, count, PARTS)
    finite = (norm == norm) & (tl.abs(norm) < float("inf")) & (tl.abs(top) < float("inf"))
    temperature = _real(columns, 4, n, row)
    floor = tl.load(floors + row) if CUT else _LOWEST
    at = tl.arange(0, C)
    token = tl.load(ids + row * c + at, mask=at < c, other=-1).to(tl.int64)
    x = _scaled(logits, base, token, token >= 0, temperature)
    if CUT:
        x = tl.where(_key(x, token) >= floor, x, -float("inf"))
    norm = tl.where(finite, norm, float("nan"))
    logprob = tl.where(token < 0, -float("inf"), (x - top) - norm)
    tl.store(values + row * c + at, logprob, mask=at < c)
    name = tl.full((), -1, tl.int64)
    if (tl.load(columns + 3 * n + row) != 0) & finite:
        noise = tl.load(columns + 2 * n + row).to(tl.uint64, bitcast=True)
        bits = _stream_bits(noise, tl.load(columns + n + row))
        name = _name(
            logits, base, vocabulary, temperature, floor, _HIGHEST, ids + row * c + 1,
            c - 1, top, norm, bits, BLOCK, CUT, True,
        )  # fmt: skip
    found = _scaled(logits, base, name, name >= 0, temperature)
    tl.store(names + row, name)
    tl.store(name_values + row, (found - top) - norm)


@_jit
def cut_kernel(logits, columns, floors, n, vocabulary, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Write the least key of a row that top-k, top-p and min-p leave in."""
    row = tl.program_id(0).to(tl.int64)
    top_p, min_p = _real(columns, 5, n, row), _real(columns, 6, n, row)
    top_k = tl.load(columns + 7 * n + row)
    floor = tl.full((), _LOWEST, tl.int64)
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        base = tl.load(columns + 8 * n + row) * stride
        temperature = _real(columns, 4, n, row)
        top = tl.full((), -float("inf"), tl.float32)
        for start in range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = _scaled(logits, base, token, token < vocabulary, temperature)
            top = tl.maximum(top, tl.max(x, axis=0))
        least = tl.full((), -(1 << 31), tl.int64)
        if top_k > 0:
            wanted = tl.minimum(top_k, vocabulary).to(tl.float64)
            least = _split(logits, base, vocabulary, temperature, top, least, wanted, BLOCK, False)
        floor = least << 32
        if top_p < 1.0:
            total = _weight(logits, base, vocabulary, temperature, top, least, BLOCK)
            wanted = total * top_p.to(tl.float64)
            edge = _split(logits, base, vocabulary, temperature, top, least, wanted, BLOCK, True)
            above = _weight(logits, base, vocabulary, temperature, top, edge + 1, BLOCK)
            each = tl.exp(_ordered(edge.to(tl.int32)) - top).to(tl.float64)
            ties = tl.maximum(tl.ceil((wanted - above) / each), 1.0).to(tl.int64)
            floor = _tie(logits, base, vocabulary, temperature, edge, ties, BLOCK)
        if min_p > 0.0:
            least = _order(top + tl.log(min_p)).to(tl.int64)
            floor = tl.maximum(floor, least << 32)
    tl.store(floors + row, floor)


@triton.jit
def _split(  # type: ignore[no-untyped-def]
    logits, base, vocabulary, temperature, top, least, wanted, BLOCK: tl.constexpr,  # noqa: N803
    MASS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Return the largest order whose tokens reach `wanted`, in number or in mass."""
    low = tl.full((), -(1 << 31), tl.int64)
    for step in tl.static_range(8):
        bounds = low + (tl.arange(0, 16).to(tl.int64) << (28 - 4 * step))
        reached = tl.zeros((16,), tl.float64)
        for start in range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            inside = token < vocabulary
            x = _scaled(logits, base, token, inside, temperature)
            order = _order(x).to(tl.int64)
            weight = inside.to(tl.float64)
            if MASS:
                weight = tl.where(inside & (order >= least), tl.exp(x - top), 0.0).to(tl.float64)
            above = order[:, None] >= bounds[None, :]
            reached += tl.sum(tl.where(above, weight[:, None], 0.0), axis=0)
        passed = tl.sum((reached >= wanted).to(tl.int32), axis=0)
        low += tl.maximum(passed - 1, 0).to(tl.int64) << (28 - 4 * step)
    return low


@triton.jit
def _weight(logits, base, vocabulary, temperature, top, least, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Return the mass of tokens of at least this order, in units of the most probable one."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocabulary
        x = _scaled(logits, base, token, inside, temperature)
        kept = inside & (_order(x).to(tl.int64) >= least)
        total += tl.sum(tl.where(kept, tl.exp(x - top), 0.0).to(tl.float64), axis=0)
    return total


@triton.jit
def _tie(logits, base, vocabulary, temperature, edge, ties, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Return the key of the `ties`-th token of this order by id, or of the last one."""
    seen = tl.full((), 0, tl.int64)
    last = tl.full((), 0, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = (start + tl.arange(0, BLOCK)).to(tl.int64)
        x = _scaled(logits, base, token, token < vocabulary, temperature)
        tied = (_order(x).to(tl.int64) == edge) & (token < vocabulary)
        number = seen + tl.cumsum(tied.to(tl.int64), axis=0)
        last = tl.maximum(last, tl.max(tl.where(tied & (number <= ties), token, 0), axis=0))
        seen += tl.sum(tied.to(tl.int64), axis=0)
    return (edge << 32) | (_IDS - last)


@triton.jit
def _name(  # type: ignore[no-untyped-def]
    logits, base, vocabulary, temperature, floor, edge, listed, k, top, norm, key,
    BLOCK: tl.constexpr, CUT: tl.constexpr, LISTED: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Return the token outside a list with the largest log p - log E; -1: none has mass.

    A token is outside if its key is less than `edge`, and with LISTED if it is not one of `k` ids.
    """
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    best = tl.full((), -float("inf"), tl.float64)
    winner = tl.full((), -1, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = _scaled(logits, base, token, token < vocabulary, temperature)
        own = _key(x, token)
        outside = own < edge
        if CUT:
            outside = outside & (own >= floor)
        if LISTED:
            for at in range(k):
                outside = outside & (token != tl.load(listed + at))
        score = tl.where(outside, (x - top) - norm, -float("inf")).to(tl.float64)
        score = score - tl.log(_exponential(token, key, low, high))
        most = tl.max(score, axis=0)
        place = start + tl.argmax(score, axis=0).to(tl.int64)
        winner = tl.where(most > best, place, winner)
        best = tl.maximum(most, best)
    return winner


@triton.jit
def _exponential(token, key, low, high):  # type: ignore[no-untyped-def]
    """Return exponential noise, -log(1 - v), also for v far below the rounding of 1 - v."""
    z = token.to(tl.uint32) * 0x9E3779B9 + low
    z = (z ^ (z >> 16)) * 0x85EBCA6B + high
    z = (z ^ (z >> 13)) * 0xC2B2AE35
    bits = z ^ (z >> 16)
    more = _mix(key + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 11
    v = (bits.to(tl.float64) + (more.to(tl.float64) + 0.5) * 1.1102230246251565e-16) * (
        2.3283064365386963e-10
    )
    small = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    return tl.where(v < 1e-4, small, -tl.log(1.0 - v))


@triton.jit
def _stream_bits(seed, position):  # type: ignore[no-untyped-def]
    start = _mix(seed + 0x9E3779B97F4A7C15)
    return _mix(start + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _real(columns, index, n, row):  # type: ignore[no-untyped-def]
    """Load a packed column that holds the bits of float64."""
    return tl.load(columns + index * n + row).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _scaled(logits, base, token, inside, temperature):  # type: ignore[no-untyped-def]
    """Load logits over the temperature, -inf outside."""
    return (
        tl.load(logits + base + token, mask=inside, other=-float("inf")).to(tl.float32)
        / temperature
    )


@triton.jit
def _add(x, top, total):  # type: ignore[no-untyped-def]
    """Add values to a running maximum and relative sum of exponentials; nan stays."""
    most = tl.maximum(top, tl.max(x, axis=0))
    scale = tl.where(top == -float("inf"), 0.0, tl.exp(top - most))
    terms = tl.where(x == -float("inf"), 0.0, tl.exp(x - most))
    return most, tl.where(total == 0.0, 0.0, total * scale) + tl.sum(terms, axis=0)


@triton.jit
def _norm(maxima, sums, row, count, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Return a row's largest value, and the logarithm of its sum relative to it."""
    part = tl.arange(0, PARTS)
    most = tl.load(maxima + row * count + part, mask=part < count, other=-float("inf"))
    held = tl.load(sums + row * count + part, mask=part < count, other=0.0)
    top = tl.max(most, axis=0)
    total = tl.sum(tl.where(held == 0.0, 0.0, held * tl.exp(most - top)), axis=0)
    return top, tl.log(total)


@triton.jit
def _best(best, keys, K: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Return the K largest of K and more keys."""
    return tl.topk(tl.reshape(tl.join(best, tl.topk(keys, K)), [2 * K]), K)


@triton.jit
def _key(x, token):  # type: ignore[no-untyped-def]
    return (_order(x).to(tl.int64) << 32) | (_IDS - token.to(tl.int64))


@triton.jit
def _token(key):  # type: ignore[no-untyped-def]
    return _IDS - (key & _IDS)


@triton.jit
def _value(key):  # type: ignore[no-untyped-def]
    return _ordered((key >> 32).to(tl.int32))


@triton.jit
def _order(x):  # type: ignore[no-untyped-def]
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _ordered(order):  # type: ignore[no-untyped-def]
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
