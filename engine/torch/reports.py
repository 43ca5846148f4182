"""Chooses the draws that each row appends, and turns them into the chunks that requests report."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.engine.protocol import GenerateRequest, TokenChunk, provenance_of
from asyncrl.engine.sampling.stopping import cut_rows
from asyncrl.engine.torch.rows import Rows
from asyncrl.engine.torch.step_kernels import (
    GeneratedTokens,
    advance_rows,
    append_draws,
    choose_draws,
    pack,
)
from asyncrl.engine.torch.step_sampling import Draws
from asyncrl.rollout.acceptance import AcceptedPaths
from asyncrl.rollout.trajectory import FinishReason, IntArray, KeptTokens, Provenance

_NO_WALK = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class AppendedDraws:
    """The M draws that rows append in a step."""

    chosen: NDArray[np.int64]
    """`[M]` indices of draws, row after row."""
    row: NDArray[np.int64]
    step: NDArray[np.int64]
    """`[M]` place of each among its row's new tokens, from 0."""
    kept: IntArray
    """`[n]` tokens that each row appends."""
    accepted: IntArray
    """`[n]` upper bound of accepted drafts or kept tokens among them; then comes a free draw."""
    stopped: NDArray[np.bool_]
    """`[n]` True if the last one is a stop token or completes a stop string."""


def choose(rows: Rows, draws: Draws, walks: AcceptedPaths | None) -> AppendedDraws:
    """Choose each row's path, cut after its first stop token or string and at its limit.

    `rows` do not have this step's tokens yet. `walks` are paths of the decoding rows, which come
    first; None: nothing was drafted.
    """
    n = rows.n
    accepted: IntArray = draws.accepted
    walked, walk = 0, _NO_WALK
    if walks is not None:
        walked, walk = len(walks.accepted), walks.draws
        accepted = np.concatenate([walks.accepted, accepted[walked:]])
    most = n + int(accepted.sum())
    chosen, row, step = (np.empty(most, np.int64) for _ in range(3))
    kept, stopped = np.empty(n, np.int32), np.empty(n, np.bool_)
    size = choose_draws(
        accepted, draws.starts, walked, walk, draws.tokens, rows.stops, draws.begun, rows.left(),
        chosen, row, step, kept, stopped,
    )  # fmt: skip
    chosen, row, step = chosen[:size], row[:size], step[:size]
    if rows.with_stop_rule:
        _follow_strings(rows, draws, row, step, draws.tokens[chosen], kept, stopped)
        if int(kept.sum()) < size:
            inside = step < kept[row]
            chosen, row, step = chosen[inside], row[inside], step[inside]
    return AppendedDraws(chosen, row, step, kept, accepted, stopped)


def _follow_strings(
    rows: Rows,
    draws: Draws,
    row: NDArray[np.int64],
    step: NDArray[np.int64],
    tokens: NDArray[np.int64],
    kept: IntArray,
    stopped: NDArray[np.bool_],
) -> None:
    """Advance the rows' stop rules over their new tokens; cut `kept` where one is completed."""
    of_row = [request.sampling.stop_rule for request in rows.requests]
    renewed = np.flatnonzero(draws.begun)
    if len(renewed):
        for one in renewed.tolist():
            rule = of_row[one]
            rows.stop_state[one] = rule.start if rule is not None else 0
        this_turn = step >= draws.begun[row]
        row, step, tokens = row[this_turn], step[this_turn], tokens[this_turn]
    for rule in {id(rule): rule for rule in of_row if rule is not None}.values():
        mine = np.array([other is rule for other in of_row])
        cut_rows(rule.table, rule.classes, mine, rows.stop_state, row, step, tokens, kept, stopped)


def moved_places(
    draws: Draws, paths: AppendedDraws, decoding: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return row, place and chain's place of accepted nodes whose KV is not where a chain has it.

    Places count from the first token that the row was fed. The first `decoding` rows decode.
    """
    row = paths.row
    place = paths.chosen - draws.starts[row]
    apart = (row < decoding) & (place != paths.step)
    return row[apart], place[apart], paths.step[apart]


class Unreported:
    """Tokens that rows have generated and not reported yet. S slots, B tokens per row, K top-K."""

    def __init__(self, slots: int, buffer: int, top_k: int) -> None:
        self.count = np.zeros(slots, np.int32)
        self.begun = np.zeros(slots, np.bool_)
        """`[S]` True if the row has reported anything."""
        self._buffers = GeneratedTokens.empty(slots, buffer, top_k=top_k)
        self._long: dict[int, GeneratedTokens] = {}
        """Tokens of steps with kept tokens, by row, however many; reported in that step."""

    def begin(self, row: int) -> None:
        """Reset a row for a new request."""
        self.count[row] = 0
        self.begun[row] = False

    def move(self, source: int, target: int) -> None:
        """Follow a row that has moved into the place of one that ended."""
        self.count[target], self.begun[target] = self.count[source], self.begun[source]
        for buffer in self._buffers:
            buffer[target] = buffer[source]

    def record(
        self, draws: Draws, paths: AppendedDraws, rows: Rows, chunk_tokens: int
    ) -> tuple[list[int], list[int]]:
        """Append the tokens of a step, here and to `rows`, and count them.

        Returns rows that report and continue, as they have `chunk_tokens` tokens to report, and
        rows that have ended, from the last one down. Rows whose kept tokens were judged may have
        more tokens than the buffers hold and must be reported (`chunks`) before the next step.
        """
        n = len(paths.kept)
        judged = np.zeros(n, np.bool_)
        judged[draws.judged] = True
        append_draws(
            paths.chosen, paths.row, paths.step, paths.accepted, judged,
            draws.tokens, draws.logprobs, draws.ids, draws.values, draws.noise_seeds,
            rows.tokens, rows.total, self.count, self._buffers,
        )  # fmt: skip
        for row in draws.judged.tolist():
            self._long[row] = _judged(draws, row, int(paths.kept[row]), rows.requests[row].kept)
        due, ended = np.empty(n, np.int64), np.empty(n, np.int64)
        dues, ends = advance_rows(
            paths.kept, paths.stopped, judged, rows.total, rows.limit, rows.kv_length,
            self.count, self.begun, chunk_tokens, due, ended,
        )  # fmt: skip
        return due[:dues][::-1].tolist(), ended[:ends].tolist()

    def chunks(
        self,
        rows: Sequence[int],
        requests: Sequence[GenerateRequest],
        policy_version: int,
        reasons: Sequence[FinishReason | None],
    ) -> list[TokenChunk]:
        """Report what some rows have generated since their last chunks, under `policy_version`.

        `reasons` are the finish reasons of their requests; None: it continues.
        """
        if not rows:
            return []
        index = np.array(rows, np.int64)
        counts = self.count[index]
        if self._long:
            counts[[row in self._long for row in rows]] = 0
        packed = pack(self._buffers, index, counts)
        ends = np.cumsum(counts).tolist()
        self.count[index] = 0
        self.begun[index] = True
        out, start = [], 0
        for one, request, end, reason in zip(rows, requests, ends, reasons, strict=True):
            generated, span = packed, slice(start, end)
            start = end
            if one in self._long:
                generated, span = self._long.pop(one), slice(None)
            out.append(_chunk(generated, span, request, policy_version, reason))
        return out


def _judged(draws: Draws, row: int, count: int, kept: KeptTokens | None) -> GeneratedTokens:
    """Return the `count` tokens of a row with kept tokens: accepted ones, then a draw."""
    start = int(draws.starts[row])
    span = slice(start, start + count)
    provenance = np.full(count, Provenance.SAMPLED, np.uint8)
    if kept is not None:
        accepted = min(int(draws.accepted[row]), count)
        provenance[:accepted] = provenance_of(kept, accepted)
    return GeneratedTokens(
        draws.tokens[span].astype(np.int32),
        draws.logprobs[span].copy(),
        draws.ids[span].copy(),
        draws.values[span].copy(),
        draws.noise_seeds[span].copy(),
        provenance,
    )


def _chunk(
    generated: GeneratedTokens,
    span: slice,
    request: GenerateRequest,
    policy_version: int,
    reason: FinishReason | None,
) -> TokenChunk:
    k = request.sampling.top_k_logprobs
    ids, values = generated.topk_ids[span], generated.topk_logprobs[span]
    if k < ids.shape[1]:
        ids, values = ids[:, :k].copy(), values[:, :k].copy()
    return TokenChunk(
        request_id=request.request_id,
        tokens=generated.tokens[span],
        logprobs=generated.logprobs[span],
        topk_ids=ids,
        topk_logprobs=values,
        noise_seeds=generated.noise_seeds[span],
        provenance=generated.provenance[span],
        policy_version=policy_version,
        finish_reason=reason,
    )
