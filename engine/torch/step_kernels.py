"""Per-row work of a step in compiled loops: places of draws, paths, appended tokens.

Each function is one call for all rows of a step. None releases Python's lock: another thread would
take it at every one. `warm_up` compiles or loads them and all others, so that no step waits for a
compiler.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.cache.tree import rollout_tree as tree
from asyncrl.engine.drafting.proposals import warm_up as warm_up_proposals
from asyncrl.engine.drafting.step_times import warm_up as warm_up_step_times
from asyncrl.engine.drafting.trees import plant
from asyncrl.engine.sampling.logits import warm_up as warm_up_drawing
from asyncrl.engine.torch.model import SlotModel
from asyncrl.rollout.acceptance import accept_tree, warm_up_verification
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import ByteArray, FloatArray, IntArray, Provenance, SeedArray

kernel = kernels_of("engine/torch", "rollout")

LongArray = NDArray[np.int64]
Flags = NDArray[np.bool_]

_DRAFTED, _SAMPLED = int(Provenance.DRAFTED), int(Provenance.SAMPLED)


class GeneratedTokens(NamedTuple):
    """Values that are reported about M tokens: `[M]`, lists `[M, K]`.

    In a buffer of B tokens for each of S rows: `[S, B]`, lists `[S, B, K]`.
    """

    tokens: IntArray
    logprobs: FloatArray
    topk_ids: IntArray
    topk_logprobs: FloatArray
    noise_seeds: SeedArray
    provenance: ByteArray

    @classmethod
    def empty(cls, *shape: int, top_k: int) -> GeneratedTokens:
        """Return arrays to be filled."""
        return cls(
            np.empty(shape, np.int32),
            np.empty(shape, np.float32),
            np.empty((*shape, top_k), np.int32),
            np.empty((*shape, top_k), np.float32),
            np.empty(shape, np.uint64),
            np.empty(shape, np.uint8),
        )


class Places(NamedTuple):
    """Places of N draws, row by row."""

    row: LongArray
    starts: LongArray
    positions: LongArray
    seeds: SeedArray
    noise_seeds: SeedArray
    """`[N]` seeds of the noise for tokens outside the list."""


def place_draws(
    sizes: IntArray, depths: IntArray, responses: IntArray, seeds: SeedArray, noise: SeedArray
) -> Places:
    """Return the places of `sizes` `[n]` draws of each row.

    `depths` `[D]` are, for the first D draws, the places of their tokens after the row's last one;
    the draws of other rows follow each other. `responses` `[n]` are response lengths.
    """
    n, size = len(sizes), int(sizes.sum())
    places = Places(
        np.empty(size, np.int64),
        np.empty(n, np.int64),
        np.empty(size, np.int64),
        np.empty(size, np.uint64),
        np.empty(size, np.uint64),
    )
    _place(sizes, depths, responses, seeds, noise, places)
    return places


@kernel
def _place(
    sizes: IntArray,
    depths: IntArray,
    responses: IntArray,
    seeds: SeedArray,
    noise: SeedArray,
    places: Places,
) -> None:
    at = 0
    for row in range(len(sizes)):
        places.starts[row] = at
        for offset in range(sizes[row]):
            places.row[at] = row
            places.positions[at] = responses[row] + (depths[at] if at < len(depths) else offset)
            places.seeds[at] = seeds[row]
            places.noise_seeds[at] = noise[row]
            at += 1


@kernel
def choose_draws(
    accepted: IntArray,
    starts: LongArray,
    walked: int,
    walk: IntArray,
    tokens: LongArray,
    stops: LongArray,
    begun: IntArray,
    left: IntArray,
    chosen: LongArray,
    row: LongArray,
    step: LongArray,
    kept: IntArray,
    stopped: Flags,
) -> int:
    """Choose each row's path: what it accepts and one more draw, up to a stop token or its limit.

    Each of n rows accepts `accepted` drafts and kept tokens, has its first draw at `starts`, and
    may still generate `left` tokens; the leading `begun` tokens of its path are of earlier turns,
    whose stops do not count. `stops` `[n, stops]` are padded with -1. `walked` rows take their
    draws from `walk` `[P]`, row after row; others take those from `starts` on. `tokens` `[N]` are
    those of the draws.

    Filled are `chosen` `[M]`, the draws of the paths, row after row, with the `row` of each and the
    `step`, its place in its path; `kept` `[n]`, the length of each path; and `stopped` `[n]`: its
    last token is a stop token. Returns M.
    """
    at = passed = 0
    for r in range(len(accepted)):
        count = accepted[r] + 1
        kept[r], stopped[r] = 0, False
        for place in range(min(count, left[r])):
            draw = walk[passed + place] if r < walked else starts[r] + place
            chosen[at], row[at], step[at] = draw, r, place
            at += 1
            kept[r] = place + 1
            if place < begun[r]:
                continue
            for stop in stops[r]:
                stopped[r] |= stop == tokens[draw]
            if stopped[r]:
                break
        if r < walked:
            passed += count
    return at


@kernel
def append_draws(
    chosen: LongArray,
    row: LongArray,
    step: LongArray,
    accepted: IntArray,
    judged: Flags,
    tokens: LongArray,
    logprobs: FloatArray,
    ids: IntArray,
    values: FloatArray,
    noise_seeds: SeedArray,
    contexts: IntArray,
    total: IntArray,
    count: IntArray,
    buffers: GeneratedTokens,
) -> None:
    """Append the chosen draws `[M]`, row after row, to the rows' contexts and buffers.

    `row` and `step`, the place among a row's new tokens, are `[M]`; `accepted` drafts among them
    and `judged` rows, which are not reported from the buffers, `[n]`. `tokens` to `noise_seeds` are
    those of all N draws. `contexts` `[S, W]` had `total` `[S]` tokens before, the buffers `count`
    `[S]`.
    """
    k = ids.shape[1]
    for m in range(len(chosen)):
        draw, r = chosen[m], row[m]
        contexts[r, total[r] + step[m]] = tokens[draw]
        if judged[r]:
            continue
        at = count[r] + step[m]
        buffers.tokens[r, at] = tokens[draw]
        buffers.logprobs[r, at] = logprobs[draw]
        for j in range(k):
            buffers.topk_ids[r, at, j] = ids[draw, j]
            buffers.topk_logprobs[r, at, j] = values[draw, j]
        buffers.noise_seeds[r, at] = noise_seeds[draw]
        buffers.provenance[r, at] = _DRAFTED if step[m] < accepted[r] else _SAMPLED


@kernel
def advance_rows(
    kept: IntArray,
    stopped: Flags,
    judged: Flags,
    total: IntArray,
    limit: IntArray,
    kv_length: IntArray,
    count: IntArray,
    begun: Flags,
    chunk_tokens: int,
    due: LongArray,
    ended: LongArray,
) -> tuple[int, int]:
    """Count what each row has appended, and find the rows that report.

    `kept` `[n]` tokens were appended; `stopped` `[n]` rows ended with one of them; `judged` `[n]`
    rows must report. `total`, `kv_length` and `count`, tokens to report, are `[S]` and updated;
    `limit` is `[S]`; `begun` `[S]`: whether a row has reported anything. `due` and `ended`, from
    the last one down, are filled. Returns their numbers.
    """
    dues = ends = 0
    for row in range(len(kept) - 1, -1, -1):
        kv_length[row] = total[row] + kept[row] - 1
        total[row] += kept[row]
        count[row] += kept[row]
        if stopped[row] or total[row] >= limit[row]:
            ended[ends] = row
            ends += 1
        elif judged[row] or count[row] >= chunk_tokens or not begun[row]:
            due[dues] = row
            dues += 1
    return dues, ends


def pack(buffers: GeneratedTokens, rows: LongArray, counts: IntArray) -> GeneratedTokens:
    """Pack the first `counts[i]` tokens of each of some rows of a buffer, row after row."""
    packed = GeneratedTokens.empty(int(counts.sum()), top_k=buffers.topk_ids.shape[2])
    _pack(buffers, rows, counts, packed)
    return packed


@kernel
def _pack(
    buffers: GeneratedTokens, rows: LongArray, counts: IntArray, packed: GeneratedTokens
) -> None:
    k = packed.topk_ids.shape[1]
    at = 0
    for i in range(len(rows)):
        row = rows[i]
        for place in range(counts[i]):
            packed.tokens[at] = buffers.tokens[row, place]
            packed.logprobs[at] = buffers.logprobs[row, place]
            packed.noise_seeds[at] = buffers.noise_seeds[row, place]
            packed.provenance[at] = buffers.provenance[row, place]
            for j in range(k):
                packed.topk_ids[at, j] = buffers.topk_ids[row, place, j]
                packed.topk_logprobs[at, j] = buffers.topk_logprobs[row, place, j]
            at += 1


@kernel
def pick_tokens(
    chosen: LongArray,
    tokens: LongArray,
    kept: IntArray,
    wanted: Flags,
    picked: IntArray,
    offsets: IntArray,
) -> int:
    """Gather the new tokens of the `wanted` `[n]` rows; return the number of these rows.

    `chosen` `[M]` are draws, row after row, `kept` `[n]` of each row. `picked` `[M]` and `offsets`
    `[n + 1]`, the begin of each wanted row's tokens and the end, are filled.
    """
    at = rows = size = 0
    offsets[0] = 0
    for row in range(len(kept)):
        if wanted[row]:
            for place in range(at, at + kept[row]):
                picked[size] = tokens[chosen[place]]
                size += 1
            rows += 1
            offsets[rows] = size
        at += kept[row]
    return rows


@torch.inference_mode()
def warm_up(model: SlotModel, *, listed: int, drafting: bool) -> None:
    """Load or compile the kernels that a core uses: a few seconds once per machine.

    Takes half a minute on a GPU. `listed` is K of the core's draws; `drafting`: there is a cache.
    """
    if drafting:
        tree.warm_up()
        warm_up_step_times()
    none, two = np.array([-1, -1], np.int32), np.array([2], np.int32)
    one = np.array([0, 1], np.int32)
    forked = tree.Drafts(one, none, np.array([0, 2], np.int32), np.ones(2, np.float32))
    trees = plant(forked, two, two, 2)
    trees.hidden()
    accept_tree(np.zeros(3, np.int64), trees.tokens, trees.parents, trees.offsets)
    warm_up_proposals()
    warm_up_verification()
    first = np.zeros(1, np.int32)
    warm_up_drawing(model.forward_fresh(first, first + 1, np.zeros(1, np.int64)), listed)
    _warm_up_step()


def _warm_up_step() -> None:
    """Compile the loops of `asyncrl.engine.torch.step_kernels`, for two rows with a draw each."""
    zero, none = np.zeros(2, np.int32), np.empty(0, np.int32)
    seeds, flags = np.zeros(2, np.uint64), np.zeros(2, np.bool_)
    row, starts, _, _, noise = place_draws(zero + 1, none, zero, seeds, seeds)
    chosen, at, step = (np.empty(2, np.int64) for _ in range(3))
    kept, total, stops = zero.copy(), zero.copy(), np.full((2, 1), -1, np.int64)
    choose_draws(zero, starts, 0, none, row, stops, zero, zero + 1, chosen, at, step, kept, flags)
    lists = np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32)
    buffers = GeneratedTokens.empty(2, 1, top_k=1)
    append_draws(
        chosen, at, step, zero, flags, row, lists[1][:, 0].copy(), *lists, noise,
        np.zeros((2, 1), np.int32), total, zero.copy(), buffers,
    )  # fmt: skip
    advance_rows(
        kept, flags, flags, total, zero + 2, zero.copy(), zero.copy(), flags, 1, row, chosen
    )
    pack(buffers, starts, kept)
    pick_tokens(starts, row, kept, flags, zero.copy(), np.zeros(3, np.int32))
