"""Draws and lookups from the logits of a step, in slabs of rows under a limit of memory.

The operations between logits and a token need several arrays over the vocabulary: 4,096 rows at
once would take more than 5 GB. Rows are independent, so slabs change no result. The limit is
`engine.logits_mib`, without the model's logits themselves. On a GPU kernels work from the logits
directly (`engine.sampling.logits_triton`), so only the output layer has to be asked in slabs there.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.protocol import SamplingParams
from asyncrl.engine.sampling.drawing import Drawn, Streams, TopK, draw, identify, top_k
from asyncrl.engine.sampling.drawing import warm_up as warm_up_drawing
from asyncrl.engine.sampling.truncation import SamplingColumns, processed_logprobs
from asyncrl.engine.sampling.verification import KeptBatch, KeptColumns, Reading, Verdict
from asyncrl.rollout.trajectory import FloatArray

BYTES_PER_LOGIT = 12
"""Most bytes held per logit while its row is processed: a float32 copy, the log-probability, and
the rounding of the device's allocator."""
BYTES_PER_TRUNCATED_LOGIT = 64
"""The same with top-k, top-p or min-p: sorted copies, indices, a cumulative sum in float64."""
MAX_FUSED_K = 64
"""Longest list that the kernels for GPUs find, the maximum of engine.top_k_logprobs."""


class LogitDraws(NamedTuple):
    """A token of each of N rows, and the table that is reported."""

    tokens: torch.Tensor
    """`[N]` int64; -1 if the distribution is not finite."""
    ids: torch.Tensor
    """`[T, 1 + K]` int32: the token of each row (0 if none), then its list, padded with -1."""
    logprobs: torch.Tensor
    """`[T, 1 + K]` float32 of `ids`; not finite if the distribution is not."""


class LogitReading(NamedTuple):
    """Values of given tokens in the distributions of N rows."""

    reading: Reading
    listed: TopK | None
    """`[N, K]` their most probable tokens, if requested."""


class ProcessedRows:
    """Distributions stored as processed log-probabilities, `[R, V]` float32, on any device.

    Arguments `rows` of its methods are `[N]` rows, which may repeat.
    """

    def __init__(self, logprobs: torch.Tensor) -> None:
        self._logprobs = logprobs

    def draw(self, k: int, streams: Streams, rows: NDArray[np.int64] | None = None) -> Drawn:
        """Draw a token from each row, and list its K most probable ones; None: all in order."""
        return draw(self._logprobs, k, streams, rows)

    def top_k(self, k: int, rows: NDArray[np.int64] | None = None) -> TopK:
        """List the K most probable tokens of each row; None: all in order."""
        return top_k(self._logprobs, k, rows)

    def read(self, rows: NDArray[np.int64], columns: KeptColumns) -> Reading:
        """Look up given tokens, `[N]`, and name those drawn outside their lists again."""
        tokens, ids = columns.tokens, columns.ids
        found = self._at(rows, np.concatenate([tokens[:, None], ids], axis=1))
        own, listed = found[:, 0].copy(), found[:, 1:]
        names, name_logprobs = tokens.astype(np.int64), own.copy()
        tail = np.flatnonzero(columns.outside())
        if len(tail):
            seeds = columns.noise_seeds[tail]
            named = identify(self._logprobs, rows[tail], ids[tail], columns.positions[tail], seeds)
            names[tail] = named
            name_logprobs[tail] = self._at(rows[tail], named[:, None])[:, 0]
        return Reading(own, listed, names, name_logprobs).given(columns)

    def name_tokens(
        self,
        batch: KeptBatch,
        verdict: Verdict,
        unnamed: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> None:
        """Name tokens of the `unnamed` rows of the verdict, by fresh noise.

        A token stays -1 if nothing is outside its list after all: the residual was rounding (about
        1e-7). `rows` are those at `Verdict.place` of each.
        """
        if len(unnamed):
            outside = verdict.outside(batch, unnamed)
            where = outside.positions, outside.noise_seeds
            tokens = identify(self._logprobs, rows, outside.ids, *where)
            verdict.set_names(unnamed, tokens, self._at(rows, tokens[:, None])[:, 0])

    def _at(self, rows: NDArray[np.int64], ids: NDArray[np.integer]) -> FloatArray:
        """Return `[N, C]` log-probabilities of the ids `[N, C]`; -inf for id -1."""
        columns = ids.astype(np.int64).clip(min=0)
        where = torch.from_numpy(np.stack([np.broadcast_to(rows[:, None], columns.shape), columns]))
        row, column = where.to(self._logprobs.device)
        values: FloatArray = self._logprobs[row, column].float().cpu().numpy()
        return np.where(ids >= 0, values, np.float32(-np.inf))


class FusedRows:
    """Distributions computed from `[R, V]` logits at each call, by kernels for lists of `k`."""

    def __init__(self, logits: torch.Tensor, sampling: SamplingColumns, k: int = 1) -> None:
        self._logits, self._sampling, self._k = logits, sampling, k

    def draw(self, k: int, streams: Streams, rows: NDArray[np.int64] | None = None) -> Drawn:
        """See `ProcessedRows`. K is 1 to `MAX_FUSED_K`."""
        from asyncrl.engine.sampling.logits_triton import draw_rows

        sampling = self._sampling if rows is None else self._sampling.at(rows)
        tokens, ids, values = draw_rows(self._logits, sampling, k, streams, rows=rows)
        return Drawn(tokens, TopK(ids[:, 1:], values[:, 1:]), values[:, 0])

    def top_k(self, k: int, rows: NDArray[np.int64] | None = None) -> TopK:
        """See `ProcessedRows`."""
        zeros = np.zeros(len(self._logits) if rows is None else len(rows), np.int64)
        streams = Streams(zeros.astype(np.uint64), zeros, zeros.astype(np.uint64))
        listed = self.draw(max(k, self._k), streams, rows).listed  # the draw is not used
        return TopK(listed.ids[:, :k], listed.logprobs[:, :k])

    def read(self, rows: NDArray[np.int64], columns: KeptColumns) -> Reading:
        """See `ProcessedRows`."""
        from asyncrl.engine.sampling.logits_triton import look_up_rows

        tail = columns.outside()
        found = look_up_rows(self._logits, self._sampling.at(rows), columns, tail, rows)
        values = found.values.cpu().numpy()
        own, names = values[:, 0].copy(), columns.tokens.astype(np.int64)
        name_logprobs = own.copy()
        names[tail] = found.names.cpu().numpy()[tail]
        named = tail & (names >= 0)
        name_logprobs[tail] = -np.inf
        name_logprobs[named] = found.name_values.cpu().numpy()[named]
        return Reading(own, values[:, 1:], names, name_logprobs).given(columns)

    def name_tokens(
        self,
        batch: KeptBatch,
        verdict: Verdict,
        unnamed: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> None:
        """See `ProcessedRows`."""
        from asyncrl.engine.sampling.logits_triton import look_up_rows

        columns, every = verdict.outside(batch, unnamed), np.ones(len(unnamed), np.bool_)
        found = look_up_rows(self._logits, self._sampling.at(rows), columns, every, rows)
        names = found.names.cpu().numpy()
        values = np.where(names >= 0, found.name_values.cpu().numpy(), np.float32(-np.inf))
        verdict.set_names(unnamed, names, values)


Distributions = ProcessedRows | FusedRows


def distributions_of(
    logits: torch.Tensor, sampling: SamplingColumns, k: int, max_bytes: int | None = None
) -> Distributions:
    """Return the distributions of rows of logits `[R, V]`, which may be overwritten.

    `k` is that of the engine, at least that of the lists; `max_bytes` may be held (None: all rows).
    """
    if fused(logits, k):
        return FusedRows(logits, sampling, k)
    return ProcessedRows(process_all(logits.float(), sampling, max_bytes))


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
    """Draw a token from each row of logits `[N, V]`, which may be overwritten.

    `k` is the length of the lists; at most `max_bytes` are held at once. `places` `[N]` are the
    rows of the table with `table_rows` rows (None: all in order, N); other rows of it are 0.
    """
    n, device = len(logits), logits.device
    if fused(logits, k):
        from asyncrl.engine.sampling.logits_triton import draw_rows

        return LogitDraws(*draw_rows(logits, sampling, k, streams, places, table_rows))
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
        values[at] = torch.cat([drawn.logprobs[:, None], drawn.listed.logprobs], dim=1)
    return LogitDraws(tokens, ids, values)


def read_from_logits(
    logits: torch.Tensor,
    sampling: SamplingColumns,
    columns: KeptColumns,
    k: int = 0,
    *,
    listed: int = 1,
) -> LogitReading:
    """Look up given tokens, and list the `k` most probable ones if `k` > 0, in one piece.

    `logits` `[N, V]` of at most `rows_at_once` rows may be overwritten; `listed` is K of the
    engine.
    """
    distributions = distributions_of(logits, sampling, max(k, listed))
    reading = distributions.read(np.arange(len(logits)), columns)
    return LogitReading(reading, distributions.top_k(k) if k else None)


def warm_up(logits: torch.Tensor, k: int) -> None:
    """Compile or load the code that draws and reads; called before the first step.

    Takes seconds once per machine on a CPU; on a GPU half a minute, for each type of logits,
    vocabulary size and K. Of `logits` `[n, V]` only type, device and V count.
    """
    if not fused(logits, k):
        warm_up_drawing()
        return
    tokens = np.zeros(1, np.int32)
    columns = KeptColumns.only_tokens(tokens, k)._replace(exact=np.ones(1, np.bool_))
    streams = Streams(columns.noise_seeds, columns.positions, columns.noise_seeds)
    for sampling in (SamplingParams(1), SamplingParams(1, top_p=0.5)):
        even, ways = torch.zeros_like(logits[:1]), SamplingColumns.of([sampling])
        draw_from_logits(even, ways, k, streams, max_bytes=1)
        read_from_logits(even, ways, columns, k, listed=k)
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)


def fused(logits: torch.Tensor, k: int) -> bool:
    """Return True if the kernels for GPUs are used."""
    return logits.device.type == "cuda" and 0 < k <= MAX_FUSED_K


def process_all(
    logits: torch.Tensor, sampling: SamplingColumns, max_bytes: int | None
) -> torch.Tensor:
    """Return `[N, V]` log-probabilities that are drawn from; overwrites float32 logits."""
    at_once = len(logits)
    if max_bytes is not None:
        at_once = rows_at_once(logits.shape[1], sampling, max_bytes)
    if len(logits) <= at_once:
        return processed_logprobs(logits, sampling)
    for part in slabs(len(logits), at_once):
        logits[part] = processed_logprobs(logits[part], _part(sampling, part))
    return logits


def rows_at_once(vocabulary: int, sampling: SamplingColumns, max_bytes: int) -> int:
    """Return the number of rows that may be processed at once; at least 1."""
    each = BYTES_PER_TRUNCATED_LOGIT if sampling.truncated.any() else BYTES_PER_LOGIT
    return max(1, max_bytes // (each * vocabulary))


def slabs(n: int, size: int) -> Iterator[slice]:
    """Yield 0 .. n - 1 in slices of at most `size`."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def _part(sampling: SamplingColumns, part: slice) -> SamplingColumns:
    whole = part.stop - part.start == len(sampling.temperature)
    return sampling if whole else sampling.at(np.arange(part.start, part.stop))
