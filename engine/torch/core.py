"""DecodeCore: the whole torch engine without asyncio. Requests in, steps, token chunks out.

One step is one forward pass (`step`):

    admit    waiting requests take free slots; siblings of a prompt share its prefill
    draft    every decoding row gets a token tree, as much as the planner finds worth it
    forward  last tokens and trees of decoding rows, whole contexts of new ones with the tokens that
             they kept, packed
    draw     a fresh token at every position, from (seed, position in the response)
    keep     draws that stay in the tree, and the first that leaves it; of kept tokens those that
             the current policy accepts, and what it draws behind them. All other KV is void
    report   first tokens, rows with enough unreported ones, and rows that ended

The order of rows in a step: decoding rows, then those that copy a running sibling's prompt (they
decode as well, from the prompt's last token), then contexts to take in, then their siblings.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine.drafting.planner import DraftPlanner
from engine.errors import EngineError, RequestError
from engine.protocol import GenerateRequest, Score, ScoreRequest, TokenChunk
from engine.requests import Limits
from engine.sampling import MAX_LOGITS, draw, processed_logprobs, top_k, uniforms
from engine.torch.drafting import DraftSource, draft, follow, ragged
from engine.torch.model import Feed, SlotModel
from engine.torch.paths import Draws, Paths, choose
from engine.torch.rows import NO_ROW, Rows, Written
from engine.torch.scoring import score_all
from engine.torch.trees import TokenTrees
from engine.torch.verification import judge_rows, not_finite
from engine.torch.waiting import Waiting, context_of, fed_context, logits_of
from engine.torch.weights import check_weights, copy_weights
from rollout.acceptance import AcceptedPaths, accept_tree
from rollout.trajectory import FinishReason, IntArray, Provenance
from wire.records import EngineStats, TokenCounts

_STEP_TOKENS = 4096
"""Most tokens of a decoding step where the planner decides, if their logits fit into memory."""


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Bounds of the core; see `TorchConfig` and `EngineConfig`."""

    max_step_tokens: int | None
    """None: what the planner finds worth it, within `_STEP_TOKENS` and `MAX_LOGITS`."""
    max_draft_tokens: int
    max_prefill_tokens: int
    chunk_tokens: int
    top_k: int
    draft_trees: bool = True


@dataclass(frozen=True, slots=True)
class _Admitted:
    """The new rows of a step, after the decoding ones."""

    leaders: list[int]
    """Rows whose context is taken in; contiguous, sorted by what they feed."""
    followers: list[tuple[int, int]]
    """(row, index of its leader): the leader's KV and logits serve it as well."""
    lengths: IntArray
    """Tokens that each leader feeds: its context and the tokens that it kept."""
    wanted: IntArray
    """Positions of each leader whose logits are needed: one, and one for each kept token."""


class DecodeCore:
    """Continuous batching with exact drafting over a loaded model. Not thread-safe.

    Args:
        model: what is sampled from.
        settings: bounds.
        source: where drafts come from; None: only from requests' own old texts.
        seed: of the stream that gives seeds to requests without one.
        planner: how much to draft; None: one that learns from this core's own step times.
    """

    def __init__(
        self,
        model: SlotModel,
        settings: CoreSettings,
        source: DraftSource | None,
        *,
        seed: int,
        planner: DraftPlanner | None = None,
    ) -> None:
        self._model = model
        self._settings = settings
        self._source = source
        self._seeds = np.random.default_rng(seed)
        most = min(_STEP_TOKENS, max(MAX_LOGITS // model.vocab_size, model.cache.slots))
        self._planner = planner or DraftPlanner(
            max_step_tokens=settings.max_step_tokens or most,
            max_draft_tokens=settings.max_draft_tokens,
        )
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
        if request.kept is not None and not len(request.kept):
            request = replace(request, kept=None)
        self._waiting.add(request)

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        """Forget a request and free its slot; nothing happens when it has ended already."""
        if self._waiting.drop(request_id) is None and request_id in self._rows:
            self._release(self._rows.row_of(request_id))

    @torch.inference_mode()
    def interrupt(self, request_id: str) -> list[TokenChunk]:
        """End a request and free its slot; gives its last chunk, with all that it has drawn."""
        waiting = self._waiting.drop(request_id)
        if waiting is not None:
            return [_aborted(waiting, self.policy_version)]
        if request_id not in self._rows:
            return []
        row = self._rows.row_of(request_id)
        chunk = self._rows.chunk(row, self.policy_version, "abort")
        self._release(row)
        return [chunk]

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
        seeds = [self._seed_of(request) for request in requests]
        return score_all(
            self._model,
            requests,
            seeds,
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
        if self._source is not None:
            self._source.advance(policy_version)
        return chunks

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        n, cache = self._rows.n, self._model.cache
        return EngineStats(
            tokens=TokenCounts(
                generated=self._generated, drafted=self._drafted, accepted=self._accepted
            ),
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
        prompts = int(admitted.lengths.sum())
        trees = self._draft(decoding, prompts)
        context = int((self._kv_length[:decoding] + trees.counts).sum())
        logits = self._forward(trees, admitted)
        draws = self._draw(trees, admitted, logits)
        paths = self._keep(trees, draws)
        chunks = self._report(paths, draws.judged)
        seconds = time.perf_counter() - began
        self._planner.observe(
            tokens=int(trees.counts.sum()) + prompts,
            rows=decoding,
            context=context,
            seconds=seconds,
        )
        self._steps += 1
        self._busy_seconds += seconds
        return chunks

    def _admit(self) -> tuple[int, _Admitted]:
        """Fill free slots. Gives the number of decoding rows, and the rows with new contexts."""
        free = self._rows.slots - self._rows.n
        requests = self._waiting.take(
            free, self._settings.max_prefill_tokens, MAX_LOGITS // self._model.vocab_size
        )
        fresh: list[list[GenerateRequest]] = [[r] for r in requests if r.kept is not None]
        groups: dict[bytes, list[GenerateRequest]] = {}
        for request in requests:
            if request.kept is None:
                groups.setdefault(context_of(request).tobytes(), []).append(request)
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
        fresh.sort(key=lambda group: len(fed_context(group[0])))
        leaders = [self._take(group[0]) for group in fresh]
        followers = [
            (self._take(request), leader)
            for leader, group in enumerate(fresh)
            for request in group[1:]
        ]
        lengths = np.array([len(fed_context(group[0])) for group in fresh], np.int32)
        wanted = np.array([logits_of(group[0]) for group in fresh], np.int32)
        return decoding, _Admitted(leaders, followers, lengths, wanted)

    def _sibling_row(self, context: IntArray) -> int | None:
        """A running row that begins with this context, its KV made under the current weights."""
        rows, n = self._rows, self._rows.n
        if not n or len(context) < 2:
            return None
        fits = (rows.kv_version[:n] == self.policy_version) & (rows.total[:n] >= len(context))
        fits &= self._kv_length[:n] >= len(context) - 1
        fits &= (rows.tokens[:n, : len(context)] == context).all(axis=1)
        return int(fits.argmax()) if fits.any() else None

    def _seed_of(self, request: GenerateRequest | ScoreRequest) -> int:
        seed = request.sampling.seed
        if seed is None:
            seed = int(self._seeds.integers(0, 1 << 63))
        return seed & 0xFFFFFFFFFFFFFFFF

    def _take(self, request: GenerateRequest) -> int:
        cache_row = NO_ROW
        if self._source is not None and request.cache_key:
            cache_row = self._source.open(request.cache_key, context_of(request))
        row = self._rows.take(
            request,
            seed=self._seed_of(request),
            policy_version=self.policy_version,
            cache_row=cache_row,
        )
        self._kv_length[row] = 0
        return row

    def _draft(self, decoding: int, prompts: int) -> TokenTrees:
        trees = draft(
            self._rows,
            decoding,
            self._planner,
            self._source,
            branching=self._settings.draft_trees,
            other_tokens=prompts,
            vocab_size=self._model.vocab_size,
        )
        self._drafted += len(trees.tokens)
        return trees

    def _forward(self, trees: TokenTrees, admitted: _Admitted) -> torch.Tensor:
        rows, decoding = self._rows, trees.rows
        last = rows.tokens[np.arange(decoding), rows.total[:decoding] - 1]
        leaders = slice(decoding, decoding + len(admitted.leaders))
        contexts, _ = ragged(rows.tokens[leaders], admitted.lengths)
        feed = Feed(
            trees.fed(last, trees.tokens),
            trees.counts,
            self._kv_length[:decoding],
            contexts,
            admitted.lengths,
            admitted.wanted,
            trees.fed(np.zeros(decoding, np.int32), trees.depths) if trees.forked else None,
            trees.hidden() if trees.forked else None,
        )
        logits = self._model.forward(feed)
        for row, leader in admitted.followers:
            source = admitted.leaders[leader]
            self._model.cache.copy_row(source, row, int(rows.total[source]))
        return logits

    def _draw(self, trees: TokenTrees, admitted: _Admitted, logits: torch.Tensor) -> Draws:
        """Fresh draws after every token that was fed, and a verdict on every kept token."""
        rows, decoding = self._rows, trees.rows
        sizes = np.concatenate([trees.counts, admitted.wanted])
        if admitted.followers:
            ends = np.cumsum(sizes)[decoding:] - 1
            shared = [ends[leader] for _, leader in admitted.followers]
            index = np.concatenate([np.arange(logits.shape[0]), shared])
            logits = logits[torch.from_numpy(index).to(logits.device)]
            sizes = np.concatenate([sizes, np.ones(len(shared), np.int32)])
        row = np.repeat(np.arange(rows.n), sizes)
        starts = np.cumsum(sizes) - sizes
        offset = np.arange(len(row)) - starts[row]
        if trees.forked:
            nodes = trees.fed(np.zeros(decoding, np.int32), trees.depths)
            offset[: len(nodes)] = nodes
        logprobs = processed_logprobs(logits, rows.temperature[row], rows.top_p[row])
        judged = [r for r, w in zip(admitted.leaders, admitted.wanted, strict=True) if w > 1]
        tokens = np.full(len(row), -1, np.int64)
        own = np.flatnonzero(~np.isin(row, judged)) if judged else np.arange(len(row))
        if len(own):
            position = (rows.total - rows.prompt)[row[own]] + offset[own]
            mine = logprobs
            if judged:
                mine = logprobs[torch.from_numpy(own).to(logprobs.device)]
            tokens[own] = draw(mine, uniforms(rows.seed[row[own]], position)).cpu().numpy()
        if (tokens[own] < 0).any():
            names = [rows.requests[r].request_id for r in row[own][tokens[own] < 0]]
            raise EngineError(not_finite(names, self.policy_version))
        draws = Draws(
            row,
            offset,
            starts,
            logprobs,
            tokens,
            np.array(judged, np.int64),
            np.zeros(rows.n, np.int32),
        )
        if judged:
            judge_rows(rows, draws, self.policy_version)
        return draws

    def _keep(self, trees: TokenTrees, draws: Draws) -> Paths:
        """Choose what each row writes, write it, and leave only its KV in place."""
        rows, n, decoding = self._rows, self._rows.n, trees.rows
        walks = self._walk(trees, draws) if len(trees.tokens) else None
        paths = choose(rows, draws, walks)
        if trees.forked:
            self._compact(draws, paths, decoding)
        self._record(draws, paths)
        self._kv_length[:n] = rows.total[:n] + paths.kept - 1
        rows.total[:n] += paths.kept
        self._feed_cache(draws, paths)
        follow(rows, n, paths.kept)
        for row in draws.judged:
            # What was put in a token's place is most often a substitute: the old text goes on.
            rows.old_at[row] = draws.accepted[row] + 1
            rows.in_step[row] = True
        self._generated += int((paths.kept - np.minimum(draws.accepted, paths.kept)).sum())
        if walks is not None:
            self._accepted += int(np.minimum(walks.accepted, paths.kept[:decoding]).sum())
        return paths

    def _walk(self, trees: TokenTrees, draws: Draws) -> AcceptedPaths:
        """Follow the draws through the trees, and tell the planner what came of its estimates."""
        walks = accept_tree(
            draws.tokens[: len(trees.tokens) + trees.rows],
            trees.tokens,
            trees.parents,
            trees.offsets,
        )
        right = np.zeros(len(trees.tokens), np.bool_)
        right[walks.nodes] = True
        self._planner.judge(trees.path_probabilities, right)
        return walks

    def _compact(self, draws: Draws, paths: Paths, decoding: int) -> None:
        """Move the KV of accepted nodes to where a chain would have put it."""
        row = draws.row[paths.chosen]
        place = paths.chosen - draws.starts[row]
        apart = (row < decoding) & (place != paths.step)
        if apart.any():
            first = self._kv_length[row[apart]]
            self._model.cache.move(row[apart], first + place[apart], first + paths.step[apart])

    def _record(self, draws: Draws, paths: Paths) -> None:
        """Copy what was chosen into the context and the buffers of what is to be reported."""
        rows, chosen = self._rows, paths.chosen
        row, tokens = draws.row[chosen], draws.tokens[chosen]
        logprobs = draws.logprobs
        if len(chosen) < len(draws.row):
            logprobs = logprobs[torch.from_numpy(chosen).to(logprobs.device)]
        column = torch.from_numpy(tokens[:, None]).to(logprobs.device)
        picked = logprobs.gather(1, column).squeeze(1).cpu().numpy()
        ids, values = top_k(logprobs, self._settings.top_k)
        provenance = np.where(
            paths.step < paths.accepted[row], Provenance.DRAFTED, Provenance.SAMPLED
        )
        if len(draws.judged):
            stays = np.isin(row, draws.judged) & (provenance == Provenance.DRAFTED)
            provenance[stays] = Provenance.VERIFIED
        written = Written(tokens.astype(np.int32), picked, ids, values, provenance.astype(np.uint8))
        rows.record(draws.judged, row, paths.step, written)

    def _feed_cache(self, draws: Draws, paths: Paths) -> None:
        """Let siblings draft from what was just written."""
        handles = self._rows.cache_row[: self._rows.n]
        if self._source is None or (handles == NO_ROW).all():
            return
        fed = handles != NO_ROW
        tokens = draws.tokens[paths.chosen][fed[draws.row[paths.chosen]]]
        offsets = np.concatenate([[0], np.cumsum(paths.kept[fed])])
        self._source.extend(
            handles[fed].astype(np.int32), tokens.astype(np.int32), offsets.astype(np.int32)
        )

    def _report(self, paths: Paths, judged: NDArray[np.int64]) -> list[TokenChunk]:
        rows, n = self._rows, len(paths.kept)
        full = rows.total[:n] >= rows.limit[:n]
        ended = paths.stopped | full
        due = ~ended & ((rows.unsent[:n] >= self._settings.chunk_tokens) | ~rows.told[:n])
        due[judged] = ~ended[judged]
        chunks = [rows.chunk(int(row), self.policy_version) for row in np.flatnonzero(due)]
        # From the last row down: the row that moves into a freed place is then never an ended one.
        for row in np.flatnonzero(ended)[::-1]:
            reason: FinishReason = "stop" if paths.stopped[row] else "length"
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
