"""The running requests as a table of arrays: one row per request, the first n of them in use.

Rows stay contiguous: when a request ends, the last row moves into its place (`release`). The KV
slot of a row has the row's index and moves with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError
from engine.protocol import GenerateRequest, TokenChunk
from rollout.trajectory import ByteArray, FinishReason, FloatArray, IntArray

NO_ROW = -1
NONE: NDArray[np.int32] = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Written:
    """M tokens with all that is reported of them."""

    tokens: IntArray
    """`[M]`"""
    logprobs: FloatArray
    """`[M]`"""
    topk_ids: IntArray
    """`[M, K]`"""
    topk_logprobs: FloatArray
    """`[M, K]`"""
    provenance: ByteArray
    """`[M]`"""

    def pick(self, index: NDArray[np.int64]) -> Written:
        """Some of them."""
        return Written(
            self.tokens[index],
            self.logprobs[index],
            self.topk_ids[index],
            self.topk_logprobs[index],
            self.provenance[index],
        )


class Rows:
    """State of every running request. S slots, W context width, B buffered tokens, K top-K."""

    def __init__(self, slots: int, width: int, buffer: int, top_k: int) -> None:
        self.slots = slots
        self.n = 0
        self.requests: list[GenerateRequest] = []
        self._row_of: dict[str, int] = {}
        # Context: prompt, prefix and response, `[S, W]`; the next token to feed is the last one.
        self.tokens = np.zeros((slots, width), np.int32)
        self.total = np.zeros(slots, np.int32)
        self.prompt = np.zeros(slots, np.int32)
        self.limit = np.zeros(slots, np.int32)
        self.kv_version = np.zeros(slots, np.int64)
        # How it samples.
        self.seed = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.stops = np.full((slots, 1), -1, np.int64)
        # Where drafts come from: a row of the cache, and an old continuation with a cursor.
        self.cache_row = np.full(slots, NO_ROW, np.int64)
        self.old = np.full((slots, width), -1, np.int32)
        self.old_length = np.zeros(slots, np.int32)
        self.old_at = np.zeros(slots, np.int32)
        self.in_step = np.zeros(slots, np.bool_)
        self.told = np.zeros(slots, np.bool_)
        """`[slots]` whether anything was reported of the row."""
        # Tokens drawn but not reported yet.
        self.unsent = np.zeros(slots, np.int32)
        self.out_tokens = np.zeros((slots, buffer), np.int32)
        self.out_logprobs = np.zeros((slots, buffer), np.float32)
        self.out_ids = np.zeros((slots, buffer, top_k), np.int32)
        self.out_topk = np.zeros((slots, buffer, top_k), np.float32)
        self.out_provenance = np.zeros((slots, buffer), np.uint8)
        # What a step wrote that verified kept tokens: as long as it likes, reported in that step.
        self._long: dict[str, Written] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def row_of(self, request_id: str) -> int:
        """Row of a running request. Raises KeyError when it is not running."""
        return self._row_of[request_id]

    def left(self) -> NDArray[np.int32]:
        """`[n]` tokens that each row may still write."""
        return self.limit[: self.n] - self.total[: self.n]

    def take(
        self, request: GenerateRequest, *, seed: int, policy_version: int, cache_row: int
    ) -> int:
        """Give the next row to a request. Raises EngineError when all are taken."""
        if self.n == self.slots:
            raise EngineError(f"no free slot for request {request.request_id!r}")
        row = self.n
        sampling = request.sampling
        start, prefix = len(request.prompt_tokens), len(request.prefix_tokens)
        self.tokens[row, :start] = request.prompt_tokens
        self.tokens[row, start : start + prefix] = request.prefix_tokens
        self.total[row] = start + prefix
        self.prompt[row] = start
        self.limit[row] = start + sampling.max_tokens
        self.kv_version[row] = policy_version
        self.seed[row] = seed
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self._set_stops(row, sampling.stop_tokens)
        self.cache_row[row] = cache_row
        kept = NONE if request.kept is None else request.kept.tokens
        # Behind the context, where they are scored; they do not belong to it yet.
        self.tokens[row, start + prefix : start + prefix + len(kept)] = kept
        old = (kept if len(kept) else request.draft_tokens)[: self.old.shape[1]]
        self.old[row, : len(old)] = old
        self.old_length[row] = len(old)
        self.old_at[row] = 0
        self.in_step[row] = True
        self.told[row] = False
        self.unsent[row] = 0
        self.requests.append(request)
        self._row_of[request.request_id] = row
        self.n += 1
        return row

    def release(self, row: int) -> int | None:
        """End a row; gives the row that must move into its place (already moved here), or None."""
        if not 0 <= row < self.n:
            raise EngineError(f"row {row} released twice")
        last = self.n - 1
        del self._row_of[self.requests[row].request_id]
        moved = self.requests.pop()
        self.n = last
        if row == last:
            return None
        self.requests[row] = moved
        self._row_of[moved.request_id] = row
        for column in self._columns():
            column[row] = column[last]
        return last

    def record(
        self,
        judged: NDArray[np.int64],
        row: NDArray[np.int64],
        step: NDArray[np.int64],
        written: Written,
    ) -> None:
        """Append what a step wrote to the contexts, and to what is to be reported.

        `total` stays: the caller moves it when all that depends on the old one is done.

        Args:
            judged: rows whose kept tokens were judged. They may have written more than the buffers
                hold and must be reported (`chunk`) before the next step.
            row: `[M]` of each token.
            step: `[M]` its place in what its row wrote.
            written: M tokens.
        """
        self.tokens[row, self.total[row] + step] = written.tokens
        at = self.unsent[row] + step
        self.unsent[: self.n] += np.bincount(row, minlength=self.n).astype(np.int32)
        if len(judged):
            for one in judged:
                part = np.flatnonzero(row == one)
                self._long[self.requests[one].request_id] = written.pick(part)
            rest = np.flatnonzero(~np.isin(row, judged))
            row, at, written = row[rest], at[rest], written.pick(rest)
        self.out_tokens[row, at] = written.tokens
        self.out_logprobs[row, at] = written.logprobs
        self.out_ids[row, at] = written.topk_ids
        self.out_topk[row, at] = written.topk_logprobs
        self.out_provenance[row, at] = written.provenance

    def chunk(
        self, row: int, policy_version: int, reason: FinishReason | None = None
    ) -> TokenChunk:
        """Hand over what was drawn since the last chunk."""
        n = int(self.unsent[row])
        self.unsent[row] = 0
        self.told[row] = True
        name, k = self.requests[row].request_id, self.requests[row].sampling.top_k_logprobs
        written = self._long.pop(name, None)
        if written is None:
            written = Written(
                self.out_tokens[row, :n],
                self.out_logprobs[row, :n],
                self.out_ids[row, :n],
                self.out_topk[row, :n],
                self.out_provenance[row, :n],
            )
        return TokenChunk(
            request_id=name,
            tokens=written.tokens.copy(),
            logprobs=written.logprobs.copy(),
            topk_ids=written.topk_ids[:, :k].copy(),
            topk_logprobs=written.topk_logprobs[:, :k].copy(),
            provenance=written.provenance.copy(),
            policy_version=policy_version,
            finish_reason=reason,
        )

    def check(self) -> None:
        """Raise EngineError unless free + held == slots and names and rows agree."""
        named = sorted(self._row_of.values())
        held = len(self.requests)
        if held != self.n or named != list(range(self.n)) or not 0 <= self.n <= self.slots:
            raise EngineError(f"slots: {self.n} in use, {held} held, rows named {named}")

    def _set_stops(self, row: int, stops: tuple[int, ...]) -> None:
        missing = len(stops) - self.stops.shape[1]
        if missing > 0:
            more = np.full((self.slots, missing), -1, np.int64)
            self.stops = np.concatenate([self.stops, more], axis=1)
        self.stops[row] = -1
        self.stops[row, : len(stops)] = stops

    def _columns(self) -> Iterator[NDArray[np.generic]]:
        return (value for value in vars(self).values() if isinstance(value, np.ndarray))
