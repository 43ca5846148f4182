"""Our drafting as a speculative algorithm of SGLang (0.5.23).

SGLang reserves KV for drafts: `speculative_num_draft_tokens` = 1 + cache.max_draft_tokens places,
twice, for each running request (`mem_cache.allocation_sizing`). That bounds what a step may feed. A
step in which nothing is drafted costs what a step without speculation costs. On a CPU rows without
drafts cost one token in drafted steps as well (ragged feeding). On a GPU a drafted step feeds all
rows the places of the longest one, since only SGLang's DSPARK can use its ragged verification, and
runs without CUDA graphs. Nothing of this has run on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from asyncrl.engine.sglang.messages import CPU_ATTENTION
from asyncrl.engine.sglang.worker.api import HookRegistry, HookType
from asyncrl.engine.sglang.worker.drafts import tree_attention

NAME = "ASYNCRL"
_ASSIGN = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"


class Algorithm(CustomSpecAlgo):
    """Our answers to the questions that SGLang asks of a speculative algorithm."""

    def is_ngram(self) -> bool:
        """Return True: like NGRAM, no draft model, no KV of drafts, and trees made on the host."""
        return True

    def has_draft_kv(self) -> bool:
        """Drafts have no KV until they are verified."""
        return False

    def need_topk(self) -> bool:
        """Return False: no draft model's state is passed on."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Return False: no draft model's state is passed on."""
        return False

    def create_future_map(
        self,
        device: Any,
        pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        """Make SGLang's map as its own algorithms do (`CustomSpecAlgo` lacks the method)."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, pool, needs_cpu_seq_lens, needs_confidence_relay)

    def get_num_tokens_per_req_for_target_verify(
        self,
        num_draft_tokens: int,  # noqa: ARG002
        is_draft_worker: bool,  # noqa: ARG002
    ) -> int:
        """Return 1: CUDA graphs are captured for plain steps."""
        return 1

    def handle_server_args(self, server_args: Any) -> None:
        """Reserve KV for the places of a step only, not for chains of a draft model.

        Raises ValueError if the most draft tokens are not set, or for another attention than
        Triton's.
        """
        if not server_args.speculative_num_draft_tokens:
            raise ValueError(f"speculative_algorithm={NAME} needs speculative_num_draft_tokens")
        server_args.speculative_eagle_topk = server_args.speculative_num_steps = 1
        server_args.enable_mixed_chunk = False
        if server_args.device == "cpu":
            server_args.disable_overlap_schedule = True
            server_args.attention_backend = CPU_ATTENTION
        elif server_args.attention_backend not in (None, "triton"):
            raise ValueError(
                f"attention_backend={server_args.attention_backend}: trees of drafts of any width "
                "are verified with triton only; leave it out, or set cache.enabled: false"
            )
        else:
            server_args.attention_backend = "triton"


def register() -> None:
    """Register the algorithm and the attention for CPUs, before SGLang reads its arguments."""

    def worker(_server_args: Any) -> type:
        from asyncrl.engine.sglang.worker.drafts.spec_worker import SpecWorker

        return SpecWorker

    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=Algorithm)(worker)
    tree_attention.register()
    if not torch.cuda.is_available():
        # SGLang's is a Triton kernel, or one of its kernels for CPUs, which PyPI lacks.
        HookRegistry.register(_ASSIGN, assign_slots, HookType.REPLACE)


def assign_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,  # noqa: ARG001
) -> None:
    """Write new KV slots into SGLang's table, in place of its kernel of this name.

    Row req_pool_indices[i] of n gets the next slots of `out_cache_loc` `[sum(end - start)]` from
    start_offset[i] to end_offset[i].
    """
    start = start_offset.numpy().astype(np.int64)
    counts = end_offset.numpy() - start
    rows, slots, table = req_pool_indices.numpy(), out_cache_loc.numpy(), req_to_token.numpy()
    if (counts == 1).all():  # after a step that drafted nothing
        table[rows, start] = slots
        return
    row = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    table[rows[row], start[row] + place] = slots
