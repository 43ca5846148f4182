"""What engines do with the logits of a step, in slabs of rows under a limit of memory.

A distribution over a vocabulary of 151,936 tokens is 0.6 MB in float32, and the operations between
logits and a token need several of them at once: 4,096 rows in one piece would take more than 5 GB.
So drawing and looking up go through the rows in slabs. Rows are independent of each other, so slabs
change no result.

The limit is `engine.logits_mib`. The logits themselves, which the model computes, are not counted.

On a GPU kernels work from the logits directly (`engine.logits_triton`) and write no array over the
vocabulary, so only the output layer has to be asked in slabs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.drawing import Streams, TopK, draw, top_k
from engine.sampling import SamplingColumns, processed_logprobs
from engine.verification import KeptColumns, Reading, read

BYTES_PER_LOGIT = 12
"""Most bytes that are held for a logit while its row is processed: a float32 copy, the
log-probability, and what the device's allocator rounds up."""
BYTES_PER_TRUNCATED_LOGIT = 64
"""The same where top-k, top-p or min-p is on: sorted copies, indices, a cumulative sum in float64.
"""


MAX_FUSED_K = 64
"""Longest list that the kernels for GPUs find: that of engine.top_k_logprobs."""


class LogitDraws(NamedTuple):
    """A token of each of N rows, and the table that is reported."""

    tokens: torch.Tensor
    """`[N]` int64; -1 where a distribution is not finite."""
    ids: torch.Tensor
    """`[T, 1 + K]` int32: the token of each row (0 if there is none), then its list."""
    logprobs: torch.Tensor
    """`[T, 1 + K]` float32 of `ids`; not finite where the distribution is not."""


class LogitReading(NamedTuple):
    """What the distributions of N rows say of given tokens."""

    reading: Reading
    """`[N]`"""
    listed: TopK | None
    """`[N, K]` their most probable tokens, if they were asked for."""


def draw_from_logits(
    logits: torch.Tensor,
    sampling: SamplingColumns,
    k: int,
    streams: Streams,
    *,
    max_bytes: int,
    places: NDArray[np.int64] | None = None,
    table_rows: int | None = None,
) -> LogitDraws:
    """Draw a token from each row of logits.

    Args:
        logits: `[N, V]` of any floating-point type; may be overwritten.
        sampling: of the N rows.
        k: K of the lists.
        streams: of the N draws.
        max_bytes: memory that may be held at once for rows that are processed.
        places: `[N]` the row of the table that each belongs to; None: all in order.
        table_rows: T; None: N. Rows that nothing belongs to are 0.
    """
    n, device = len(logits), logits.device
    if fused(logits, k):
        from engine.logits_triton import draw_rows

        return LogitDraws(
            *draw_rows(
                logits, sampling, k, streams, places, n if table_rows is None else table_rows
            )
        )
    tokens = torch.empty(n, dtype=torch.int64, device=device)
    total = n if table_rows is None else table_rows
    ids = torch.zeros((total, 1 + k), dtype=torch.int32, device=device)
    values = torch.zeros((total, 1 + k), dtype=torch.float32, device=device)
    for part in slabs(n, rows_at_once(logits.shape[1], sampling, max_bytes)):
        logprobs = processed_logprobs(logits[part].float(), _part(sampling, part))
        drawn = draw(logprobs, k, streams.part(part))
        tokens[part] = drawn.tokens
        own = drawn.tokens.clamp(min=0)[:, None]
        at = part if places is None else torch.from_numpy(places[part]).to(device)
        ids[at] = torch.cat([own.to(torch.int32), drawn.listed.ids], dim=1)
        values[at] = torch.cat([logprobs.gather(1, own), drawn.listed.logprobs], dim=1)
    return LogitDraws(tokens, ids, values)


def read_from_logits(
    logits: torch.Tensor, sampling: SamplingColumns, columns: KeptColumns, k: int = 0
) -> LogitReading:
    """Look up given tokens, and list the most probable ones if `k` > 0. All rows in one piece.

    Args:
        logits: `[N, V]` of any floating-point type; may be overwritten. The caller takes at most
            `rows_at_once` rows.
        sampling: of the N rows.
        columns: `[N]` what is looked up.
        k: K of the lists.
    """
    if fused(logits, max(k, 1)):
        return _read_fused(logits, sampling, columns, k)
    logprobs = processed_logprobs(logits.float(), sampling)
    reading = read(logprobs, np.arange(len(logprobs)), columns)
    return LogitReading(reading, top_k(logprobs, k) if k else None)


def fused(logits: torch.Tensor, k: int) -> bool:
    """Whether the kernels for GPUs are used."""
    return logits.device.type == "cuda" and 0 < k <= MAX_FUSED_K


def _read_fused(
    logits: torch.Tensor, sampling: SamplingColumns, columns: KeptColumns, k: int
) -> LogitReading:
    from engine.logits_triton import draw_rows, look_up_rows

    found = look_up_rows(logits, sampling, columns)
    values = found.values.cpu().numpy()
    own, names = values[:, 0].copy(), columns.tokens.astype(np.int64)
    name_logprobs = own.copy()
    tail = columns.outside()
    names[tail] = found.names.cpu().numpy()[tail]
    named = tail & (names >= 0)
    name_logprobs[tail] = -np.inf
    name_logprobs[named] = found.name_values.cpu().numpy()[named]
    listed = None
    if k:
        streams = Streams(columns.noise_seeds, columns.positions, columns.noise_seeds)
        _, ids, logprobs = draw_rows(logits, sampling, k, streams, None, len(logits))
        listed = TopK(ids[:, 1:], logprobs[:, 1:])  # the draw is not used
    return LogitReading(Reading(own, values[:, 1:], names, name_logprobs), listed)


def process_all(logits: torch.Tensor, sampling: SamplingColumns, max_bytes: int) -> torch.Tensor:
    """The log-probabilities `[N, V]` that are drawn from; overwrites float32 logits."""
    at_once = rows_at_once(logits.shape[1], sampling, max_bytes)
    if len(logits) <= at_once:
        return processed_logprobs(logits, sampling)
    for part in slabs(len(logits), at_once):
        logits[part] = processed_logprobs(logits[part], _part(sampling, part))
    return logits


def rows_at_once(vocabulary: int, sampling: SamplingColumns, max_bytes: int) -> int:
    """How many rows may be processed at once; at least 1."""
    cut = bool(sampling.truncated.any())
    each = BYTES_PER_TRUNCATED_LOGIT if cut else BYTES_PER_LOGIT
    return max(1, max_bytes // (each * vocabulary))


def slabs(n: int, size: int) -> Iterator[slice]:
    """0 .. n - 1 in slices of at most `size`."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def _part(sampling: SamplingColumns, part: slice) -> SamplingColumns:
    whole = part.stop - part.start == len(sampling.temperature)
    return sampling if whole else sampling.at(np.arange(part.start, part.stop))
