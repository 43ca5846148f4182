"""DecodeCore: the whole torch engine without asyncio. Requests in, steps, token chunks out.

One step is one forward pass (`step`):

    admit    waiting requests take free slots; siblings of a prompt share its prefill
    draft    every decoding row gets a proposal within the step's budget
    forward  last tokens and drafts of decoding rows, whole contexts of new ones, packed
    draw     a fresh token at every position, from (seed, position in the response)
    keep     draws that follow the draft, and the first that does not; all KV past them is void
    report   rows with enough unreported tokens, and rows that ended

The order of rows in a step: decoding rows, then those that copy a running sibling's prompt (they
decode as well, from the prompt's last token), then prompts to take in, then their siblings.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cache.acceptance import accept_point_mass
from cache.trajectory import FinishReason, IntArray, Provenance
from engine.budget import draft_budgets
from engine.errors import EngineError, RequestError
from engine.protocol import EngineStats, GenerateRequest, Score, ScoreRequest, TokenChunk
from engine.torch.drafting import DraftSource, follow, propose, ragged
from engine.torch.model import Feed, SlotModel
from engine.requests import Limits
from engine.torch.rows import NO_ROW, Rows
from engine.torch.sampling import draw, processed_logprobs, top_k, uniforms
from engine.torch.scoring import score_all
from engine.torch.waiting import Waiting, context_of
from engine.torch.weights import check_weights, copy_weights


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Bounds of the core; see `TorchConfig` and `EngineConfig`."""

    max_step_tokens: int
    max_draft_tokens: int
    max_prefill_tokens: int
    chunk_tokens: int
    top_k: int


@dataclass(frozen=True, slots=True)
class _Admitted:
    """The new rows of a step, after the decoding ones."""

    leaders: list[int]
    """Rows whose context is taken in; contiguous, sorted by context length."""
    followers: list[tuple[int, int]]
    """(row, index of its leader): the leader's KV and logits serve it as well."""


@dataclass(frozen=True, slots=True)
class _Draws:
    """All draws of a step, flat, row by row."""

    row: NDArray[np.int64]
    """`[N]`"""
    offset: NDArray[np.int64]
    """`[N]` place after the row's last token."""
    logprobs: torch.Tensor
    """`[N, V]` the processed distribution of each draw."""
    tokens: NDArray[np.int64]
    """`[N]`"""


class DecodeCore:
    """Continuous batching with exact drafting over a loaded model. Not thread-safe."""

    def __init__(
        self, model: SlotModel, settings: CoreSettings, source: DraftSource | None, *, seed: int
    ) -> None:
        self._model = model
        self._settings = settings
        self._source = source
        self._seeds = np.random.default_rng(seed)
        buffer = settings.chunk_tokens + settings.max_draft_tokens + 1
        cache = model.cache
        self._rows = Rows(cache.slots, cache.max_len, buffer, settings.top_k)
        self._limits = Limits(cache.max_len, model.vocab_size, settings.top_k)
        self._kv_length = np.zeros(cache.slots, np.int32)
        self._waiting = Waiting()
        self._generated = self._drafted = self._accepted = self._steps = 0
        self._busy_seconds = 0.0
        self.policy_version = 0

    # Requests

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises RequestError when it cannot be served or its id is in use."""
        self._limits.check_generate(request)
        name = request.request_id
        if name in self._waiting or name in self._rows:
            raise RequestError(f"request {name!r}: a request of this id is being served")
        self._waiting.add(request)

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        """Forget a request and free its slot; nothing happens when it has ended already."""
        if not self._waiting.drop(request_id) and request_id in self._rows:
            self._release(self._rows.row_of(request_id))

    @torch.inference_mode()
    def close(self) -> list[TokenChunk]:
        """Abort everything. Gives each request's last chunk."""
        rows, chunks = self._rows, []
        for row in reversed(range(rows.n)):
            chunks.append(rows.chunk(row, self.policy_version, "abort"))
            self._release(row)
        chunks += [_aborted(request, self.policy_version) for request in self._waiting.drain()]
        self.check()
        return chunks

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return len(self._waiting) > 0 or self._rows.n > 0

    def flush(self) -> list[TokenChunk]:
        """Every token drawn but not reported yet."""
        unsent = np.flatnonzero(self._rows.unsent[: self._rows.n])
        return [self._rows.chunk(int(row), self.policy_version) for row in unsent]

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score given tokens under the current weights. Raises RequestError."""
        for request in requests:
            self._limits.check_score(request)
        return score_all(
            self._model,
            requests,
            max_tokens=self._settings.max_prefill_tokens,
            policy_version=self.policy_version,
        )

    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> list[TokenChunk]:
        """Swap the weights under the running requests; their KV stays.

        Returns:
            What was drawn under the old version and not reported yet.

        Raises:
            WeightsError: the weights do not fit; nothing was changed.
        """
        pairs = check_weights(self._model.module, weights)
        chunks = self.flush()
        copy_weights(pairs)
        self.policy_version = policy_version
        return chunks

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        n, cache = self._rows.n, self._model.cache
        return EngineStats(
            tokens_generated=self._generated,
            tokens_drafted=self._drafted,
            tokens_accepted=self._accepted,
            steps=self._steps,
            busy_seconds=self._busy_seconds,
            running=n,
            waiting=len(self._waiting),
            slots=cache.slots,
            kv_used=float(self._rows.total[:n].sum() / (cache.slots * cache.max_len)),
            policy_version=self.policy_version,
        )

    def check(self) -> None:
        """Raise EngineError unless free + held == slots and nothing is counted twice."""
        self._rows.check()
        self._waiting.check()

    # The step

    @torch.inference_mode()
    def step(self) -> list[TokenChunk]:
        """One forward pass: admit, draft, verify, draw. Gives what is due to be reported."""
        began = time.perf_counter()
        decoding, admitted = self._admit()
        if not self._rows.n:
            self.check()
            return []
        drafts, counts = self._propose(decoding)
        logits = self._forward(decoding, drafts, counts, admitted)
        draws = self._draw(decoding, counts, admitted, logits)
        kept, stopped = self._keep(draws, drafts, counts)
        chunks = self._report(kept, stopped)
        self._steps += 1
        self._busy_seconds += time.perf_counter() - began
        return chunks

    def _admit(self) -> tuple[int, _Admitted]:
        """Fill free slots. Gives the number of decoding rows, and the rows with new contexts."""
        free = self._rows.slots - self._rows.n
        requests = self._waiting.take(free, self._settings.max_prefill_tokens)
        groups: dict[bytes, list[GenerateRequest]] = {}
        for request in requests:
            groups.setdefault(context_of(request).tobytes(), []).append(request)
        fresh: list[list[GenerateRequest]] = []
        for group in groups.values():
            sibling = self._sibling_row(context_of(group[0]))
            if sibling is None:
                fresh.append(group)
                continue
            for request in group:
                row = self._take(request)
                length = int(self._rows.total[row]) - 1
                self._model.cache.copy_row(sibling, row, length)
                self._kv_length[row] = length
        decoding = self._rows.n
        fresh.sort(key=lambda group: len(context_of(group[0])))
        leaders = [self._take(group[0]) for group in fresh]
        followers = [
            (self._take(request), leader)
            for leader, group in enumerate(fresh)
            for request in group[1:]
        ]
        return decoding, _Admitted(leaders, followers)

    def _sibling_row(self, context: IntArray) -> int | None:
        """A running row that begins with this context, its KV made under the current weights."""
        rows, n = self._rows, self._rows.n
        if not n or len(context) < 2:
            return None
        fits = (rows.kv_version[:n] == self.policy_version) & (rows.total[:n] >= len(context))
        fits &= self._kv_length[:n] >= len(context) - 1
        fits &= (rows.tokens[:n, : len(context)] == context).all(axis=1)
        return int(fits.argmax()) if fits.any() else None

    def _take(self, request: GenerateRequest) -> int:
        seed = request.sampling.seed
        if seed is None:
            seed = int(self._seeds.integers(0, 1 << 63))
        cache_row = NO_ROW
        if self._source is not None and request.cache_key:
            cache_row = self._source.open(request.cache_key, context_of(request))
        row = self._rows.take(
            request,
            seed=seed & 0xFFFFFFFFFFFFFFFF,
            policy_version=self.policy_version,
            cache_row=cache_row,
        )
        self._kv_length[row] = 0
        return row

    def _propose(self, decoding: int) -> tuple[IntArray, IntArray]:
        budgets = draft_budgets(
            self._rows.left()[:decoding],
            max_step_tokens=self._settings.max_step_tokens,
            max_draft_tokens=self._settings.max_draft_tokens,
        )
        drafts, counts = propose(self._rows, decoding, budgets, self._source)
        self._drafted += int(counts.sum())
        return drafts, counts

    def _forward(
        self, decoding: int, drafts: IntArray, counts: IntArray, admitted: _Admitted
    ) -> torch.Tensor:
        rows = self._rows
        last = rows.tokens[np.arange(decoding), rows.total[:decoding] - 1]
        fed, _ = ragged(np.concatenate([last[:, None], drafts], axis=1), counts + 1)
        leaders = slice(decoding, decoding + len(admitted.leaders))
        contexts, _ = ragged(rows.tokens[leaders], rows.total[leaders])
        feed = Feed(fed, counts + 1, self._kv_length[:decoding], contexts, rows.total[leaders])
        logits = self._model.forward(feed)
        for row, leader in admitted.followers:
            source = admitted.leaders[leader]
            self._model.cache.copy_row(source, row, int(rows.total[source]))
        return logits

    def _draw(
        self, decoding: int, counts: IntArray, admitted: _Admitted, logits: torch.Tensor
    ) -> _Draws:
        rows, n = self._rows, self._rows.n
        per_row = np.ones(n, np.int64)
        per_row[:decoding] += counts
        row = np.repeat(np.arange(n), per_row)
        offset = np.arange(len(row)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
        if admitted.followers:
            first = logits.shape[0] - len(admitted.leaders)
            shared = [first + leader for _, leader in admitted.followers]
            index = np.concatenate([np.arange(logits.shape[0]), shared])
            logits = logits[torch.from_numpy(index).to(logits.device)]
        logprobs = processed_logprobs(logits, rows.temperature[row], rows.top_p[row])
        position = (rows.total - rows.prompt)[row] + offset
        tokens = draw(logprobs, uniforms(rows.seed[row], position)).cpu().numpy()
        if tokens.min() < 0:
            names = sorted({rows.requests[r].request_id for r in row[tokens < 0]})
            raise EngineError(
                f"the model's probabilities are not finite for requests {names[:5]} under policy "
                f"version {self.policy_version}: its weights or activations overflowed"
            )
        return _Draws(row, offset, logprobs, tokens)

    def _keep(
        self, draws: _Draws, drafts: IntArray, counts: IntArray
    ) -> tuple[IntArray, NDArray[np.bool_]]:
        """Write what is kept into rows. Gives `[n]` tokens kept, and which rows drew a stop."""
        rows, n = self._rows, self._rows.n
        width = drafts.shape[1]
        drawn = np.full((n, width + 1), -1, np.int32)
        drawn[draws.row, draws.offset] = draws.tokens
        proposed = np.full((n, width), -1, np.int32)
        proposed[: len(drafts)] = drafts
        lengths = np.zeros(n, np.int32)
        lengths[: len(counts)] = counts
        accepted = accept_point_mass(drawn, proposed, lengths)
        kept = (accepted + 1).astype(np.int32)
        columns = np.arange(width + 1)
        stops = (drawn[:, :, None] == rows.stops[:n, None, :]).any(axis=2)
        stops &= (columns < kept[:, None]) & (drawn >= 0)
        stopped = stops.any(axis=1)
        kept = np.where(stopped, stops.argmax(axis=1) + 1, kept).astype(np.int32)
        self._record(draws, kept, accepted)
        self._kv_length[:n] = rows.total[:n] + kept - 1
        rows.total[:n] += kept
        self._feed_cache(drawn, kept)
        follow(rows, n, kept)
        self._generated += int(kept.sum())
        self._accepted += int(np.minimum(accepted, kept).sum())
        return kept, stopped

    def _record(self, draws: _Draws, kept: IntArray, accepted: IntArray) -> None:
        """Copy kept draws into the context and the buffers of what is to be reported."""
        rows = self._rows
        chosen = np.flatnonzero(draws.offset < kept[draws.row])
        row, offset, tokens = draws.row[chosen], draws.offset[chosen], draws.tokens[chosen]
        logprobs = draws.logprobs
        if len(chosen) < len(draws.row):
            logprobs = logprobs[torch.from_numpy(chosen).to(logprobs.device)]
        column = torch.from_numpy(tokens[:, None]).to(logprobs.device)
        picked = logprobs.gather(1, column).squeeze(1).cpu().numpy()
        ids, values = top_k(logprobs, self._settings.top_k)
        rows.tokens[row, rows.total[row] + offset] = tokens
        at = rows.unsent[row] + offset
        rows.out_tokens[row, at] = tokens
        rows.out_logprobs[row, at] = picked
        rows.out_ids[row, at] = ids
        rows.out_topk[row, at] = values
        drafted = offset < accepted[row]
        rows.out_provenance[row, at] = np.where(drafted, Provenance.DRAFTED, Provenance.SAMPLED)
        rows.unsent[: rows.n] += kept

    def _feed_cache(self, drawn: IntArray, kept: IntArray) -> None:
        """Let siblings draft from what was just written."""
        fed = np.flatnonzero(self._rows.cache_row[: self._rows.n] != NO_ROW)
        if self._source is not None and len(fed):
            tokens, offsets = ragged(drawn[fed], kept[fed])
            self._source.extend(self._rows.cache_row[fed].astype(np.int32), tokens, offsets)

    def _report(self, kept: IntArray, stopped: NDArray[np.bool_]) -> list[TokenChunk]:
        rows, n = self._rows, len(kept)
        full = rows.total[:n] >= rows.limit[:n]
        ended = stopped | full
        due = ~ended & (rows.unsent[:n] >= self._settings.chunk_tokens)
        chunks = [rows.chunk(int(row), self.policy_version) for row in np.flatnonzero(due)]
        # From the last row down: the row that moves into a freed place is then never an ended one.
        for row in np.flatnonzero(ended)[::-1]:
            reason: FinishReason = "stop" if stopped[row] else "length"
            chunks.append(rows.chunk(int(row), self.policy_version, reason))
            self._release(int(row))
        return chunks

    def _release(self, row: int) -> None:
        handle = int(self._rows.cache_row[row])
        if self._source is not None and handle != NO_ROW:
            self._source.close(handle)
        moved = self._rows.release(row)
        if moved is not None:
            self._model.cache.copy_row(moved, row, int(self._kv_length[moved]))
            self._kv_length[row] = self._kv_length[moved]


def _aborted(request: GenerateRequest, policy_version: int) -> TokenChunk:
    """The only chunk of a request that never ran."""
    k = request.sampling.top_k_logprobs
    return TokenChunk(
        request_id=request.request_id,
        tokens=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        topk_ids=np.empty((0, k), np.int32),
        topk_logprobs=np.empty((0, k), np.float32),
        provenance=np.empty(0, np.uint8),
        policy_version=policy_version,
        finish_reason="abort",
    )
