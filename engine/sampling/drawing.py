"""Draws in two stages: a symbol, and the identity of a token outside the list.

The list of a distribution is its K most probable tokens; a *symbol* is one of them, or the tail,
which stands for all other tokens. One uniform number chooses the symbol. The token of a tail symbol
is the one with the largest log p - log E, where E is exponential noise keyed by (seed of the noise,
position, token); -log E is Gumbel noise. So drawn tokens follow p exactly, and a newer policy with
the same noise mostly names the same token: that lets verification keep tokens outside the list
(`asyncrl.rollout.acceptance.verify_kept`, docs/exactness.md).

The noise of a token is keyed by the seed of its request and the version that drew it. A verified
token keeps its list and its noise.

`engine.sampling.drawing_kernels` (CPU), the tensor operations here and
`engine.sampling.logits_triton` (GPU) compute the same bits of noise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.engine.sampling.drawing_kernels import draw_rows, identify_rows, list_rows
from asyncrl.engine.sampling.truncation import Purpose, forked, stream_bits, uniforms
from asyncrl.rollout.trajectory import FloatArray, IntArray, SeedArray

UNREPORTED_K = 32
"""K of draws whose lists are not reported."""
_SLAB = 1 << 24
"""Numbers of noise that are held at once outside a CPU, in int64."""


class TopK(NamedTuple):
    """The K most probable tokens of N distributions, on their device."""

    ids: torch.Tensor
    """`[N, K]` int32, most probable first, padded with -1."""
    logprobs: torch.Tensor
    """`[N, K]` float32, padded with -inf; nan if the distribution is not finite."""


class Drawn(NamedTuple):
    """A token of each of N distributions, with its list."""

    tokens: torch.Tensor
    """`[N]` int64; -1 if the distribution is not finite."""
    listed: TopK
    logprobs: torch.Tensor
    """`[N]` float32 of `tokens`; nan if the distribution is not finite."""


class Streams(NamedTuple):
    """Sources of the random numbers of N draws."""

    seeds: SeedArray
    positions: NDArray[np.int64]
    noise_seeds: SeedArray
    """`[N]` seeds of the noise, see `noise_seeds`."""

    def part(self, part: slice | NDArray[np.int64]) -> Streams:
        """Return some of them; a slice gives views."""
        return Streams(self.seeds[part], self.positions[part], self.noise_seeds[part])


def noise_seeds(seeds: SeedArray, policy_version: int) -> SeedArray:
    """Return `[N]` seeds of the noise of requests under a version; kept with the tokens."""
    return forked(seeds, Purpose.TAIL, policy_version)


def draw(
    logprobs: torch.Tensor, k: int, streams: Streams, rows: NDArray[np.int64] | None = None
) -> Drawn:
    """Draw a token from each of N distributions, `rows` (None: all) of `[R, V]` float32."""
    if logprobs.device.type != "cpu":
        if rows is not None:
            logprobs = logprobs[torch.from_numpy(rows).to(logprobs.device)]
        return draw_by_tensors(logprobs, k, streams)
    table, rows = _on_cpu(logprobs, rows)
    tokens, own = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
    ids, values = _lists(len(rows), k)
    draw_rows(table, rows, *streams, tokens, own, ids, values)
    listed = TopK(torch.from_numpy(ids), torch.from_numpy(values))
    return Drawn(torch.from_numpy(tokens), listed, torch.from_numpy(own))


def top_k(logprobs: torch.Tensor, k: int, rows: NDArray[np.int64] | None = None) -> TopK:
    """Return the lists of all rows of `[R, V]`, or of some."""
    if logprobs.device.type == "cpu":
        table, rows = _on_cpu(logprobs, rows)
        ids, values = _lists(len(rows), k)
        list_rows(table, rows, ids, values)
        return TopK(torch.from_numpy(ids), torch.from_numpy(values))
    if rows is not None:
        logprobs = logprobs[torch.from_numpy(rows).to(logprobs.device)]
    return _top_k_by_tensors(logprobs, k)


def identify(
    logprobs: torch.Tensor,
    rows: NDArray[np.int64],
    ids: IntArray,
    positions: NDArray[np.int64],
    noise_seeds: SeedArray,
) -> NDArray[np.int64]:
    """Return `[N]` tokens outside lists that noise names; -1 if no token outside has mass.

    `logprobs` are `[R, V]` float32, of which `rows` `[N]` are read; `ids` `[N, K]` are the lists,
    padded with -1; `positions` and `noise_seeds` are `[N]`.
    """
    if logprobs.device.type == "cpu":
        tokens = np.empty(len(rows), np.int64)
        table, rows = _on_cpu(logprobs, rows)
        known = np.ascontiguousarray(ids, np.int32)
        identify_rows(table, rows, known, positions, noise_seeds, tokens)
        return tokens
    keys = stream_bits(noise_seeds, positions)
    return identify_elsewhere(logprobs, rows, ids, keys).cpu().numpy()


def warm_up() -> None:
    """Compile the kernels, or load the compiled code (seconds, once per machine)."""
    even = torch.full((1, 4), -1.3862944)
    none = np.zeros(1, np.int64)
    streams = Streams(none.astype(np.uint64), none, none.astype(np.uint64))
    listed = draw(even, 2, streams).listed
    top_k(even, 2)
    identify(even, none, listed.ids.numpy(), none, streams.noise_seeds)


def _on_cpu(
    logprobs: torch.Tensor, rows: NDArray[np.int64] | None
) -> tuple[FloatArray, NDArray[np.int64]]:
    table: FloatArray = logprobs.contiguous().numpy()
    return table, np.arange(len(table)) if rows is None else rows


def _lists(n: int, k: int) -> tuple[IntArray, FloatArray]:
    return np.empty((n, k), np.int32), np.empty((n, k), np.float32)


def draw_by_tensors(logprobs: torch.Tensor, k: int, streams: Streams) -> Drawn:
    """Do `draw` of all rows in tensor operations, on any device."""
    device = logprobs.device
    listed = _top_k_by_tensors(logprobs, k)
    # In the order of ids: in that of probability, nearly equal ones change places by rounding.
    ids, order = torch.sort(listed.ids.masked_fill(listed.ids < 0, torch.iinfo(torch.int32).max))
    mass = torch.cumsum(listed.logprobs.gather(1, order).double().exp(), dim=1)
    whole = (listed.ids[:, -1] >= 0).double()  # otherwise nothing is outside
    total = torch.maximum(mass[:, -1], whole)
    target = torch.from_numpy(uniforms(streams.seeds, streams.positions)).to(device) * total
    symbol = torch.searchsorted(mass, target[:, None], right=True).squeeze(1)
    in_list = ids.gather(1, symbol.clamp(max=k - 1)[:, None]).squeeze(1).long()
    keys = stream_bits(streams.noise_seeds, streams.positions)
    named = _name_tails(logprobs, listed.ids, keys, symbol)
    # -1: it is listed, or the tail was rounding.
    in_list = torch.where(named >= 0, named, in_list)
    finite = listed.logprobs[:, 0] > -torch.inf
    own = logprobs.gather(1, in_list.clamp(0, logprobs.shape[1] - 1)[:, None]).squeeze(1).float()
    return Drawn(in_list.masked_fill(~finite, -1), listed, own.masked_fill(~finite, torch.nan))


def _name_tails(
    logprobs: torch.Tensor, ids: torch.Tensor, keys: SeedArray, symbols: torch.Tensor
) -> torch.Tensor:
    """Return `[N]` names of the rows whose symbol is the tail, -1 for the others."""
    names = torch.full_like(symbols, -1)
    tail = torch.nonzero(symbols == ids.shape[1]).squeeze(1)
    slab = max(1, _SLAB // logprobs.shape[1])
    for start in range(0, len(tail), slab):
        rows = tail[start : start + slab]
        names[rows] = identify_by_tensors(logprobs[rows], ids[rows], keys[rows.cpu().numpy()])
    return names


def identify_elsewhere(
    logprobs: torch.Tensor, rows: NDArray[np.int64], ids: IntArray, keys: SeedArray
) -> torch.Tensor:
    """Do `identify` on any device, by the same operations as draws there: `[N]` int64."""
    device = logprobs.device
    at, listed = torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)
    names = torch.empty_like(at)
    slab = max(1, _SLAB // logprobs.shape[1])
    for start in range(0, len(rows), slab):
        part = slice(start, start + slab)
        names[part] = identify_by_tensors(logprobs[at[part]], listed[part], keys[part])
    return names


def _top_k_by_tensors(logprobs: torch.Tensor, k: int) -> TopK:
    values, ids = torch.topk(logprobs, min(k, logprobs.shape[-1]), dim=-1)
    ids = ids.to(torch.int32).masked_fill_(torch.isneginf(values), -1)
    lacking = k - values.shape[1]
    if lacking > 0:
        ids = torch.nn.functional.pad(ids, (0, lacking), value=-1)
        values = torch.nn.functional.pad(values, (0, lacking), value=-torch.inf)
    return TopK(ids, values.float())


def identify_by_tensors(logprobs: torch.Tensor, ids: torch.Tensor, keys: SeedArray) -> torch.Tensor:
    """Do `identify` of all rows in tensor operations: `[N]` int64 from `[N, V]` and `[N, K]`."""
    outside = logprobs.double()
    columns = ids.long()
    listed = columns >= 0
    own = outside.gather(1, columns.clamp(min=0))
    # A padded place refers to token 0: it must change nothing there.
    outside.scatter_reduce_(
        1, columns.clamp(min=0), own.masked_fill(listed, -torch.inf), "amin", include_self=True
    )
    scores = outside - _exponentials(keys, logprobs.shape[1], logprobs.device).log()
    best, token = scores.max(dim=1)
    return token.masked_fill(torch.isneginf(best), -1)


def _exponentials(keys: SeedArray, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return `[N, V]` float64 noise, computed as in `asyncrl.engine.sampling.drawing_kernels`."""
    key = torch.from_numpy(keys.view(np.int64)).to(device)[:, None]
    token = torch.arange(vocab_size, device=device)[None, :]
    low = 0xFFFFFFFF
    z = (token * 0x9E3779B9 + (key & low)) & low
    z = z ^ (z >> 16)
    z = (z * 0x85EBCA6B + ((key >> 32) & low)) & low
    z = z ^ (z >> 13)
    z = (z * 0xC2B2AE35) & low
    bits = z ^ (z >> 16)
    z = key + (token + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    more = _shifted(z ^ _shifted(z, 31), 11)
    v = (bits.double() + (more.double() + 0.5) * 2.0**-53) * 2.0**-32
    return -torch.log1p(-v)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)
