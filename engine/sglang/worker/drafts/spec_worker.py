"""Runs SGLang's steps with drafts: a speculative worker of its present (V2) schema (0.5.23).

SGLang calls `forward_batch_generation` for each step, of prompts or of decoding rows, and takes
from its result the tokens of each row, their number, and the input of the next step. With
overlapped scheduling it calls it for a step before it has processed the previous one; the host then
waits here for the tokens of that one, as SGLang's NGRAM does, because drafts follow them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_utils import record_stream_for_v2_verify

from asyncrl.cache.config import CacheConfig
from asyncrl.cache.sharing.cache_setup import CachePlace, from_json, open_at, save_at
from asyncrl.cache.tree.rollout_tree import RolloutCache
from asyncrl.engine.drafting.trees import TokenTrees
from asyncrl.engine.remote.extras import DrafterSettings
from asyncrl.engine.remote.worker.drafting import planner_of, warm_up
from asyncrl.engine.remote.worker.ranks import Ranks
from asyncrl.engine.sglang.worker.drafts.drafting import Drafter
from asyncrl.engine.sglang.worker.drafts.tree_drawing import Accepted, TreeDrawing
from asyncrl.engine.sglang.worker.drafts.verify_step import (
    Feed,
    accepted_nodes,
    full_mask,
    hidden_places,
    lay_out,
    moves,
)
from asyncrl.engine.sglang.worker.requests import SchedulerBatch
from asyncrl.engine.sglang.worker.segments import visible
from asyncrl.rollout.trajectory import IntArray

Index = NDArray[np.int64]


class DraftInput(NgramVerifyInput):
    """The input of a verification, and what one step passes to the next (one class in SGLang).

    Attention reads `counts` and `masks` on a CPU, `custom_mask` on a GPU.
    """

    counts: Index
    """`[n]` tokens that each row feeds."""
    masks: dict[int, NDArray[np.bool_]]
    """Masks among the fed tokens, by row; other rows attend causally."""

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: Any = None) -> None:
        """Keep some rows; if steps overlap, SGLang does it."""
        if self.future_indices is not None:
            super().filter_batch(new_indices, new_indices_cpu)

    def merge_batch(self, spec_info: DraftInput) -> None:
        """Append other rows; if steps overlap, SGLang does it."""
        if self.future_indices is not None:
            super().merge_batch(spec_info)


@dataclass
class _Step:
    """A step whose tokens are on their way to the host."""

    trees: TokenTrees | None
    """None: it took in prompts."""
    rows: Index
    lengths: Index
    accepted: InitVar[Accepted]
    ready: Index | None
    """Rows whose tokens count; None: all."""

    def __post_init__(self, accepted: Accepted) -> None:
        parts = accepted.tokens, accepted.counts, accepted.path
        self._parts = tuple(_to_host(part) for part in parts)
        self._ready: Any = None
        if accepted.tokens.device.type != "cpu":
            self._ready = torch.get_device_module(accepted.tokens.device).Event()
            self._ready.record()

    def wait(self) -> tuple[Index, Index, Index]:
        """Return tokens `[n, W]`, counts `[n]` and path `[n, W]`."""
        if self._ready is not None:
            self._ready.synchronize()
        tokens, counts, path = (part.numpy() for part in self._parts)
        return tokens, counts, path


class SpecWorker(BaseSpecWorker):
    """Runs SGLang's steps with drafts. `attach` must be called before the first one."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:  # noqa: ARG002
        super().__init__()
        self._target_worker = target_worker
        self._places = int(get_spec().speculative_num_draft_tokens)
        self._overlap = not get_schedule().disable_overlap_schedule
        self._pool: Any = None
        self._allocator: Any = None
        self._drafter: Drafter | None = None
        self._drawing: TreeDrawing | None = None
        self._ranks = Ranks()
        self._cache: RolloutCache | None = None
        self._place = CachePlace()
        self._pending: _Step | None = None
        self.drafted = 0
        self.accepted = 0

    @property
    def draft_worker(self) -> None:
        """None, as there is no draft model."""

    def alloc_memory_pool(self, **_kwargs: Any) -> None:
        """Share the pools of the model."""
        self._pool, self._allocator = self._target_worker.get_memory_pool()

    def attach(
        self, drawing: TreeDrawing, batch: SchedulerBatch, ranks: Ranks, settings: DrafterSettings
    ) -> None:
        """Draft and draw from now on; rank 0 drafts."""
        self._ranks, self._drawing = ranks, drawing
        if not ranks.leads:
            return
        config = CacheConfig.model_validate(settings.cache)
        self._place = from_json(settings.place)
        self._cache = open_at(config, self._place)
        rows, width = self._pool.req_to_token.shape
        vocab_size = int(self._target_worker.model_runner.model_config.vocab_size)
        self._drafter = Drafter(
            self._cache,
            planner_of(settings, config.draft_tokens, vocab_size),
            batch.entry,
            rows=rows,
            width=width + self._places,
            vocab_size=vocab_size,
        )
        warm_up()

    def advance(self, policy_version: int) -> None:
        """Label later tokens with this policy version."""
        self._settle()
        if self._drafter is not None:
            self._drafter.advance(policy_version)

    def save(self) -> int:
        """Write the cache's snapshot, if it has a path for one; return its bytes."""
        return 0 if self._cache is None else save_at(self._cache, self._place)

    def now(self) -> float:
        """Return seconds of the clock that times steps; 0 if nothing is drafted."""
        return 0.0 if self._drafter is None else self._drafter.timer.clock()

    def rest(self, since: float) -> None:
        """Note that the last decode step was over at `since`, and none follows it yet."""
        if self._drafter is not None:
            self._drafter.timer.rest(since)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:  # noqa: ARG002
        """Handle a request's end; if steps overlap, a step of it may still run."""
        if self._drafter is not None:
            self._drafter.end([rid])

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Run a step; if steps overlap, `on_publish` gets the rows' new lengths once known."""
        self._settle()
        began = self.now()  # if steps overlap, the previous one is over: its tokens have come
        if self._drafter is not None:
            self._drafter.timer.begin(began)
        if not batch.forward_mode.is_decode():
            return self._extend(batch, on_publish, pp_proxy_tensors)
        return self._decode(batch, began, on_publish)

    def _extend(self, batch: Any, on_publish: Any, pp_proxy_tensors: Any) -> Any:
        """Take in prompts, and draw the first token of those that are complete."""
        drafter = self._drafter
        places = batch.req_pool_indices_cpu.tolist()
        if drafter is not None:
            for request, row in zip(batch.reqs, places, strict=True):
                drafter.take_in(request.rid, row, _text(request))
        result = self._target_worker.forward_batch_generation(
            batch, pp_proxy_tensors=pp_proxy_tensors
        )
        ready = [
            i
            for i, request in enumerate(batch.reqs)
            if request.extend_end == len(request.full_untruncated_fill_ids)
        ]
        ones = torch.ones(len(places), dtype=torch.int64, device=result.next_token_ids.device)
        tokens = result.next_token_ids.long()[:, None]
        path = torch.zeros_like(tokens)
        accepted = Accepted(tokens, ones, path, None)
        lengths = batch.seq_lens_cpu.numpy().astype(np.int64)
        rows = np.array(places, np.int64)
        self._pending = _Step(None, rows, lengths, accepted, np.array(ready, np.int64))
        if on_publish is not None:
            on_publish(batch.seq_lens)
        result.accept_lens = ones.to(torch.int32)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = self._handed_on(accepted, batch.seq_lens)
        result.speculative_num_draft_tokens = self._places
        return result

    def _decode(self, batch: Any, began: float, on_publish: Any) -> Any:
        device = batch.seq_lens.device
        if device.type != "cpu":
            record_stream_for_v2_verify(
                batch, None, torch.get_device_module(device).current_stream()
            )
        drawing = self._drawing
        if drawing is None:
            raise RuntimeError("SGLang ran a step before our scheduler was attached to its worker")
        contexts = batch.seq_lens_cpu.numpy().astype(np.int64)
        rows = batch.req_pool_indices_cpu.numpy().astype(np.int64)
        trees, last = self._drafts([one.rid for one in batch.reqs], rows, contexts + 1)
        self.drafted += len(trees.tokens)
        feed = lay_out(trees, last, contexts, ragged=device.type == "cpu")
        if self._drafter is not None:
            tokens = len(feed.tokens)
            self._drafter.timer.note(
                began, tokens=tokens, rows=len(rows), drafted=tokens - len(rows)
            )
        result = self._verify(batch, trees, feed, contexts)
        accepted = drawing(result.logits_output.next_token_logits, trees, feed)
        result.logits_output.auxiliary_device_output = accepted.output
        if trees.forked:
            _move(self._allocator.get_kvcache(), batch.out_cache_loc, feed, accepted)
        new_lengths = batch.seq_lens + accepted.counts
        if on_publish is not None:
            on_publish(new_lengths)
        self._pending = _Step(trees, rows, contexts + 1, accepted, None)
        if self._drafter is not None:
            self._drafter.timer.drawn(int(contexts.sum()) + len(feed.tokens))
        return GenerationBatchResult(
            logits_output=result.logits_output,
            next_token_ids=accepted.tokens.reshape(-1),
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=accepted.counts.to(torch.int32),
            new_seq_lens=new_lengths,
            next_draft_input=self._handed_on(accepted, new_lengths),
            speculative_num_draft_tokens=self._places,
            speculative_output_stride=accepted.tokens.shape[1],
        )

    def _drafts(self, names: list[str], rows: Index, lengths: Index) -> tuple[TokenTrees, IntArray]:
        """Return rank 0's trees of a step and the rows' last tokens, in all ranks."""
        found: tuple[TokenTrees, IntArray] | None = None
        if self._drafter is not None:
            trees = self._drafter.draft(names, rows, lengths)
            found = trees, self._drafter.last_tokens(rows, lengths)
        shared = self._ranks.share(found)
        if shared is None:
            raise RuntimeError("rank 0 did not create a drafter")
        return shared

    def _verify(self, batch: Any, trees: TokenTrees, feed: Feed, contexts: Index) -> Any:
        device = batch.seq_lens.device
        # After the row's context, in the order of feeding: SGLang has reserved these slots.
        table = self._pool.req_to_token
        row, at = (
            torch.from_numpy(one).to(device) for one in (feed.row, contexts[feed.row] + feed.place)
        )
        batch.out_cache_loc = table[batch.req_pool_indices.long()[row], at].long()
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = torch.from_numpy(feed.tokens.astype(np.int64)).to(device)
        batch.spec_info = _verify_input(batch, trees, feed, contexts)
        return self._target_worker.forward_batch_generation(batch, is_verify=True)

    def _handed_on(self, accepted: Accepted, lengths: torch.Tensor) -> DraftInput:
        """Return the input of the next step, in tables of one width for all steps."""
        tokens = accepted.tokens
        if self._overlap:
            tokens = torch.nn.functional.pad(tokens, (0, self._places - tokens.shape[1]))
        return DraftInput(
            draft_token_num=self._places,
            new_seq_lens=lengths,
            accept_tokens=tokens.to(torch.int32).flatten(),
            accept_lens=accepted.counts.to(torch.int32),
        )

    def _settle(self) -> None:
        step, self._pending = self._pending, None
        drafter = self._drafter
        if drafter is None:
            return
        if step is not None:
            tokens, counts, path = step.wait()
            rows, lengths = step.rows, step.lengths
            if step.ready is not None:
                rows, lengths, counts = rows[step.ready], lengths[step.ready], counts[step.ready]
                tokens = tokens[step.ready]
            inside = np.arange(tokens.shape[1]) < counts[:, None]
            drafter.append(rows, lengths, tokens[inside].astype(np.int32), counts)
            if step.trees is not None and len(step.trees.tokens):
                accepted = accepted_nodes(step.trees, path, counts)
                self.accepted += int(accepted.sum())
                drafter.judge(step.trees, accepted)
        drafter.settle()


def _verify_input(batch: Any, trees: TokenTrees, feed: Feed, contexts: Index) -> DraftInput:
    device = batch.seq_lens.device
    mask = None
    if device.type != "cpu":
        # A graph that was captured with a mask reads one in plain steps as well.
        mask = full_mask(trees, feed, contexts, device)
    found = DraftInput(
        draft_token=batch.input_ids,
        custom_mask=mask,
        positions=torch.from_numpy(feed.positions).to(device),
        draft_token_num=feed.width,
        new_seq_lens=batch.seq_lens,
    )
    found.counts = feed.counts
    found.masks = visible(feed.counts, *hidden_places(trees, feed)) if trees.forked else {}
    return found


def _move(pool: Any, slots: torch.Tensor, feed: Feed, accepted: Accepted) -> None:
    """Move the KV of accepted paths to where the rows' texts continue."""
    if slots.device.type == "cpu":
        source, target = moves(feed, accepted.path.numpy(), accepted.counts.numpy())
        if len(source):
            pool.move_kv_cache(slots[torch.from_numpy(target)], slots[torch.from_numpy(source)])
        return
    # Without waiting for the device: places after the end of a path are moved onto themselves.
    step = torch.arange(accepted.path.shape[1], device=slots.device)
    path = torch.where(step < accepted.counts[:, None], accepted.path, step)
    start = torch.from_numpy(np.cumsum(feed.counts) - feed.counts).to(slots.device)[:, None]
    pool.move_kv_cache(slots[(start + step).view(-1)], slots[(start + path).view(-1)])


def _text(request: Any) -> Callable[[], list[int]]:
    return lambda: [*request.origin_input_ids, *request.output_ids]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
