"""Turns the tokens that a step generates into the chunks that requests report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.protocol import GenerateRequest, TokenChunk
from engine.torch.draws import Draws
from engine.torch.paths import Paths
from engine.torch.rows import RowArrays
from rollout.trajectory import (
    ByteArray,
    FinishReason,
    FloatArray,
    IntArray,
    Provenance,
    SeedArray,
)


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """M tokens with everything that is reported of them."""

    tokens: IntArray
    """`[M]`"""
    logprobs: FloatArray
    """`[M]`"""
    topk_ids: IntArray
    """`[M, K]`"""
    topk_logprobs: FloatArray
    """`[M, K]`"""
    noise_seeds: SeedArray
    """`[M]`"""
    provenance: ByteArray
    """`[M]`"""

    @classmethod
    def of(cls, draws: Draws, paths: Paths) -> GeneratedTokens:
        """The tokens that a step chose, row after row."""
        chosen = paths.chosen
        row, tokens = draws.row[chosen], draws.tokens[chosen]
        logprobs = draws.logprobs
        if len(chosen) < len(draws.row):
            logprobs = logprobs[torch.from_numpy(chosen).to(logprobs.device)]
        column = torch.from_numpy(tokens[:, None]).to(logprobs.device)
        picked = logprobs.gather(1, column).squeeze(1).cpu().numpy()
        given = paths.step < paths.accepted[row]
        provenance = np.where(given, Provenance.DRAFTED, Provenance.SAMPLED)
        if len(draws.judged):
            provenance[np.isin(row, draws.judged) & given] = Provenance.VERIFIED
        return cls(
            tokens.astype(np.int32),
            picked,
            draws.ids[chosen],
            draws.values[chosen],
            draws.noise_seeds[chosen],
            provenance.astype(np.uint8),
        )

    def pick(self, index: NDArray[np.int64]) -> GeneratedTokens:
        """Some of them."""
        return GeneratedTokens(
            self.tokens[index],
            self.logprobs[index],
            self.topk_ids[index],
            self.topk_logprobs[index],
            self.noise_seeds[index],
            self.provenance[index],
        )


class Unreported(RowArrays):
    """Tokens that rows have generated and not reported yet. S slots, B tokens per row, K top-K."""

    def __init__(self, slots: int, buffer: int, top_k: int) -> None:
        self.count = np.zeros(slots, np.int32)
        """`[S]` tokens to report."""
        self.begun = np.zeros(slots, np.bool_)
        """`[S]` whether the row has reported anything."""
        self._tokens = np.zeros((slots, buffer), np.int32)
        self._logprobs = np.zeros((slots, buffer), np.float32)
        self._ids = np.zeros((slots, buffer, top_k), np.int32)
        self._topk = np.zeros((slots, buffer, top_k), np.float32)
        self._noise = np.zeros((slots, buffer), np.uint64)
        self._provenance = np.zeros((slots, buffer), np.uint8)
        self._long: dict[int, GeneratedTokens] = {}
        """By row: what a step with kept tokens generated, however long; reported in that step."""

    def begin(self, row: int) -> None:
        """A request has taken the row."""
        self.count[row] = 0
        self.begun[row] = False

    def record(
        self,
        judged: NDArray[np.int64],
        row: NDArray[np.int64],
        step: NDArray[np.int64],
        generated: GeneratedTokens,
    ) -> None:
        """Append what a step generated.

        Args:
            judged: rows whose kept tokens were judged. They may have more tokens than the buffers
                hold and must be reported (`chunks`) before the next step.
            row: `[M]` of each token.
            step: `[M]` its place among its row's tokens of this step.
            generated: M tokens.
        """
        at = self.count[row] + step
        sizes = np.bincount(row)
        self.count[: len(sizes)] += sizes.astype(np.int32)
        if len(judged):
            for one in judged.tolist():
                self._long[one] = generated.pick(np.flatnonzero(row == one))
            rest = np.flatnonzero(~np.isin(row, judged))
            row, at, generated = row[rest], at[rest], generated.pick(rest)
        self._tokens[row, at] = generated.tokens
        self._logprobs[row, at] = generated.logprobs
        self._ids[row, at] = generated.topk_ids
        self._topk[row, at] = generated.topk_logprobs
        self._noise[row, at] = generated.noise_seeds
        self._provenance[row, at] = generated.provenance

    def chunks(
        self,
        rows: Sequence[int],
        requests: Sequence[GenerateRequest],
        policy_version: int,
        reasons: Sequence[FinishReason | None],
    ) -> list[TokenChunk]:
        """Report what some rows have generated since their last chunks.

        Args:
            rows: each at most once.
            requests: of these rows.
            policy_version: that has generated the tokens.
            reasons: why each request ends; None: it continues.
        """
        if not rows:
            return []
        index = np.array(rows, np.int64)
        counts = self.count[index]
        if self._long:
            counts[[row in self._long for row in rows]] = 0
        ends = np.cumsum(counts, dtype=np.int64)
        row = np.repeat(index, counts)
        at = np.arange(len(row)) - np.repeat(ends - counts, counts)
        packed = GeneratedTokens(
            self._tokens[row, at],
            self._logprobs[row, at],
            self._ids[row, at],
            self._topk[row, at],
            self._noise[row, at],
            self._provenance[row, at],
        )
        self.count[index] = 0
        self.begun[index] = True
        out, start = [], 0
        for one, request, end, reason in zip(rows, requests, ends.tolist(), reasons, strict=True):
            generated, span = packed, slice(start, end)
            start = end
            if one in self._long:
                generated, span = self._long.pop(one), slice(None)
            out.append(_chunk(generated, span, request, policy_version, reason))
        return out


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
