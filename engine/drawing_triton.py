"""The names of tail tokens on a GPU: one program per row, which ends at once for other rows.

So a step needs no answer from the device before it continues: which rows drew their tail is known
there only. The noise is that of `engine.drawing_kernels`, bit by bit; logarithms may differ in the
last bits. It has run in Triton's interpreter (`tests/engine/test_drawing_triton.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def name_tails(
    logprobs: torch.Tensor, ids: torch.Tensor, keys: torch.Tensor, symbols: torch.Tensor
) -> torch.Tensor:
    """`[N]` int64 name of each row's tail token; -1 where its symbol is listed, or none has mass.

    Args:
        logprobs: `[N, V]` float32.
        ids: `[N, K]` int32 lists, padded with -1.
        keys: `[N]` int64, the bits of the noise's keys.
        symbols: `[N]` int64; K stands for the tail.
    """
    rows, vocabulary = logprobs.shape
    out = torch.full((rows,), -1, dtype=torch.int64, device=logprobs.device)
    if rows:
        logprobs, ids = logprobs.contiguous(), ids.contiguous()
        k = ids.shape[1]
        _name[(rows,)](logprobs, ids, keys, symbols, out, vocabulary, k, BLOCK=_BLOCK)
    return out


@triton.jit
def _name(logprobs, ids, keys, symbols, out, vocabulary, k, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0)
    if tl.load(symbols + row) == k:
        key = tl.load(keys + row).to(tl.uint64)
        low = (key & 0xFFFFFFFF).to(tl.uint32)
        high = (key >> 32).to(tl.uint32)
        best = tl.full((), -float("inf"), tl.float64)
        winner = tl.full((), -1, tl.int64)
        for start in range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            inside = token < vocabulary
            at = row.to(tl.int64) * vocabulary + token
            score = tl.load(logprobs + at, mask=inside, other=-float("inf")).to(tl.float64)
            for at_list in range(k):
                listed = tl.load(ids + row * k + at_list)
                score = tl.where(token == listed, -float("inf"), score)
            z = token.to(tl.uint32) * 0x9E3779B9 + low
            z = (z ^ (z >> 16)) * 0x85EBCA6B + high
            z = (z ^ (z >> 13)) * 0xC2B2AE35
            bits = z ^ (z >> 16)
            m = key + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
            m = (m ^ (m >> 30)) * 0xBF58476D1CE4E5B9
            m = (m ^ (m >> 27)) * 0x94D049BB133111EB
            m = (m ^ (m >> 31)) >> 11
            more = (m.to(tl.float64) + 0.5) * 1.1102230246251565e-16
            v = (bits.to(tl.float64) + more) * 2.3283064365386963e-10
            score = score - tl.log(_exponential(v))
            top = tl.max(score, axis=0)
            place = start + tl.argmax(score, axis=0).to(tl.int64)
            winner = tl.where(top > best, place, winner)
            best = tl.maximum(top, best)
        tl.store(out + row, winner)


@triton.jit
def _exponential(v):  # type: ignore[no-untyped-def]
    """-log(1 - v), also for v far below the rounding of 1 - v: by its series there."""
    small = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    return tl.where(v < 1e-4, small, -tl.log(1.0 - v))
