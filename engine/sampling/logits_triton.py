"""Drawing and looking up on a GPU, straight from logits: two kernels a step instead of some thirty.

    summarise_kernel   reads each row once, in parts: largest logit, sum of exponentials, best
    draw_kernel        joins the parts; writes the list, draws the symbol, names the tail token
    look_up_kernel     joins the parts; writes log-probabilities of given tokens, names tail tokens
    cut_kernel         only with top-k, top-p or min-p: finds the least probable token that stays,
                       by splitting the range of floats in 16, eight times. Nothing is sorted.

No array over the vocabulary is written. The results are defined by `engine.sampling.drawing` and
`engine.sampling.truncation`: the same random bits, the order of ids, the same rule for equal values
(lower id first). Logarithms and sums may differ from theirs in the last bits.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton

from asyncrl.engine.sampling.drawing import Streams
from asyncrl.engine.sampling.logits_kernels import (
    cut_kernel,
    draw_kernel,
    look_up_kernel,
    summarise_kernel,
)
from asyncrl.engine.sampling.truncation import SamplingColumns
from asyncrl.engine.sampling.verification import KeptColumns
from asyncrl.rollout.trajectory import SeedArray

_BLOCK, _CUT_BLOCK = 2048, 512
_BLOCKS_A_PART = 4
_LISTED = 128
"""Tokens that `look_up_kernel` takes for a row: it is compiled once for all lengths of lists."""
_SEED, _POSITION, _NOISE, _PLACE, _TEMPERATURE, _TOP_P, _MIN_P, _TOP_K, _ROW = range(9)
"""Rows of the packed columns: int64, or the bits of float64."""


class Found(NamedTuple):
    """The output of `look_up_rows`."""

    values: torch.Tensor
    """`[N, 1 + C]` float32 of the tokens and their lists; -inf for padding."""
    names: torch.Tensor
    """`[N]` int64; -1 if none was asked for, or nothing is outside the list."""
    name_values: torch.Tensor
    """`[N]` float32"""


class _Parts(NamedTuple):
    logits: torch.Tensor
    columns: torch.Tensor
    floors: torch.Tensor
    keys: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor
    cut: bool


def draw_rows(
    logits: torch.Tensor,
    sampling: SamplingColumns,
    k: int,
    streams: Streams,
    places: np.ndarray | None = None,
    table_rows: int | None = None,
    rows: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the fields of `logits.LogitDraws` for all rows at once. The logits are not changed.

    `k` is 1 to 64. Draws are from `rows` `[N]` of the logits `[R, V]`; None: all in order.
    """
    n, device = len(streams.seeds), logits.device
    table_rows = n if table_rows is None else table_rows
    columns = _pack(sampling, device, streams, np.arange(n) if places is None else places, rows)
    parts = _summarise_all(logits, columns, sampling, k)
    tokens = torch.empty(n, dtype=torch.int64, device=device)
    table = torch.empty if table_rows == n else torch.zeros
    ids = table((table_rows, 1 + k), dtype=torch.int32, device=device)
    values = table((table_rows, 1 + k), dtype=torch.float32, device=device)
    if n:
        draw_kernel[(n,)](
            *parts[:-1], tokens, ids, values, n, logits.shape[1], parts.logits.stride(0),
            parts.maxima.shape[1], k, K=parts.keys.shape[2],
            PARTS=triton.next_power_of_2(parts.maxima.shape[1]), BLOCK=_BLOCK, CUT=parts.cut,
            num_warps=8,
        )  # fmt: skip
    return tokens, ids, values


def look_up_rows(
    logits: torch.Tensor,
    sampling: SamplingColumns,
    columns: KeptColumns,
    tail: np.ndarray,
    rows: np.ndarray | None = None,
) -> Found:
    """Look up log-probabilities of given tokens and lists, and name tokens outside the lists.

    `columns` are `[N]`; where `tail` `[N]` is set, a token outside the list is named. `rows` `[N]`
    are those of the logits `[R, V]`; None: all in order.
    """
    n, device = len(columns.tokens), logits.device
    streams = Streams(columns.noise_seeds, columns.positions, columns.noise_seeds)
    packed = _pack(sampling, device, streams, tail.astype(np.int64), rows)
    wanted = np.concatenate([columns.tokens[:, None], columns.ids], axis=1).astype(np.int32)
    ids = torch.from_numpy(wanted).to(device)
    values = torch.empty(ids.shape, dtype=torch.float32, device=device)
    names = torch.empty(n, dtype=torch.int64, device=device)
    name_values = torch.empty(n, dtype=torch.float32, device=device)
    parts = _summarise_all(logits, packed, sampling, 0)
    if n:
        look_up_kernel[(n,)](
            *parts[:3], *parts[4:6], ids, values, names, name_values, n, logits.shape[1],
            parts.logits.stride(0), parts.maxima.shape[1], ids.shape[1],
            C=max(_LISTED, triton.next_power_of_2(ids.shape[1])),
            PARTS=triton.next_power_of_2(parts.maxima.shape[1]), BLOCK=_BLOCK, CUT=parts.cut,
            num_warps=8,
        )  # fmt: skip
    return Found(values, names, name_values)


def _pack(
    sampling: SamplingColumns,
    device: torch.device,
    streams: Streams,
    places: np.ndarray,
    rows: np.ndarray | None,
) -> torch.Tensor:
    """Pack all parameters of the rows, `[9, N]`, in one asynchronous copy to the device.

    A copy from pageable memory would make the host wait for everything queued before. torch reuses
    page-locked memory once the copies from it have ended.
    """
    shape = 9, len(places)
    on_host = torch.empty(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
    packed = on_host.numpy()
    reals = packed.view(np.float64)
    packed[_SEED], packed[_NOISE] = _signed(streams.seeds), _signed(streams.noise_seeds)
    packed[_POSITION], packed[_PLACE] = streams.positions, places
    packed[_ROW] = np.arange(len(places)) if rows is None else rows
    reals[_TEMPERATURE] = sampling.temperature
    if sampling.truncated.any():
        reals[_TOP_P], reals[_MIN_P] = sampling.top_p, sampling.min_p
        packed[_TOP_K] = sampling.top_k
    return on_host.to(device, non_blocking=True)


def _width(k: int) -> int:
    """Keys that kernels keep of a row. At least 2: a `topk` of 1 gives a number in Triton 3.7."""
    return max(2, triton.next_power_of_2(k)) if k else 0


def _signed(seeds: SeedArray) -> np.ndarray:
    return np.ascontiguousarray(seeds).view(np.int64)


def _summarise_all(
    logits: torch.Tensor, columns: torch.Tensor, sampling: SamplingColumns, k: int
) -> _Parts:
    n, vocabulary = columns.shape[1], logits.shape[1]
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    count = triton.cdiv(vocabulary, _BLOCK * _BLOCKS_A_PART)
    width = _width(k)
    cut = bool(sampling.truncated.any())

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    parts = _Parts(
        logits,
        columns,
        empty(n if cut else 0, dtype=torch.int64),
        empty(n, count, width, dtype=torch.int64),
        empty(n, count, dtype=torch.float32),
        empty(n, count, dtype=torch.float32),
        cut,
    )
    if n and cut:
        cut_kernel[(n,)](
            logits, columns, parts.floors, n, vocabulary, logits.stride(0), BLOCK=_CUT_BLOCK,
            num_warps=8,
        )  # fmt: skip
    if n:
        summarise_kernel[(n, count)](
            *parts[:-1], n, vocabulary, logits.stride(0), count, K=width, BLOCK=_BLOCK,
            BLOCKS=_BLOCKS_A_PART, CUT=cut, num_warps=8,
        )  # fmt: skip
    return parts
