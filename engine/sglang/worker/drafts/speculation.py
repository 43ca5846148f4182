"""Our drafting as a speculative algorithm of SGLang (0.5.23).

SGLang reserves KV for drafts: `speculative_num_draft_tokens` = 1 + cache.max_draft_tokens places,
twice, for each running request (`mem_cache.allocation_sizing`). That bounds what a step may feed. A
step in which nothing is drafted costs what a step without speculation costs. On a CPU rows without
drafts cost one token in drafted steps as well (ragged feeding). On a GPU a drafted step feeds all
rows the places of the longest one, since only SGLang's DSPARK can use its ragged verification, and
runs without CUDA graphs. Nothing of this has run on a GPU.

SGLang's attention for drafts needs GPU kernels, or CPU kernels in `sgl_kernel`, which PyPI lacks
for this build. `TreeAttention` is one for CPUs: its base class, `torch_native`, attends causally
with one number of tokens per row. Here a forward pass is described once, for all layers, as
segments (`worker.segments`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from asyncrl.engine.sglang.messages import CPU_ATTENTION
from asyncrl.engine.sglang.worker.api import HookRegistry, HookType
from asyncrl.engine.sglang.worker.segments import Segments, segments_of


class TreeAttention(TorchNativeAttnBackend):
    """Attends with rows of any number of tokens; SGLang does encoders and sliding windows."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._segments: Segments | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Describe a forward pass before its first layer."""
        super().init_forward_metadata(forward_batch)
        self._segments = self._describe(forward_batch)

    def _describe(self, forward_batch: Any) -> Segments | None:
        mode = forward_batch.forward_mode
        if forward_batch.encoder_lens is not None or mode.is_idle():
            return None
        lengths = np.asarray(forward_batch.seq_lens_cpu, np.int64)
        masks: dict[int, NDArray[np.bool_]] = {}
        if mode.is_target_verify():
            contexts = lengths
            counts, masks = _drafted(forward_batch.spec_info, contexts)
        elif mode.is_decode():
            contexts, counts = lengths - 1, np.ones_like(lengths)
        else:
            contexts = np.array(forward_batch.extend_prefix_lens_cpu, np.int64)
            counts = np.array(forward_batch.extend_seq_lens_cpu, np.int64)
        longest = int((contexts + counts).max(initial=0))
        rows = forward_batch.req_pool_indices.long()
        table = self.req_to_token_pool.req_to_token[rows, :longest]
        return segments_of(table, contexts, counts, masks)

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend with all tokens of a forward pass, after their KV is in the pool."""
        return self._attend(super().forward_extend, *args, **kwargs)

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend with a batch of one token per row, which SGLang runs without speculation."""
        return self._attend(super().forward_decode, *args, **kwargs)

    def _attend(
        self,
        theirs: Callable[..., torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        segments, pool = self._segments, self.token_to_kv_pool
        if segments is None or _special(layer):
            if batch.forward_mode.is_target_verify():
                raise NotImplementedError(
                    "drafting on a CPU does not support sliding-window or encoder layers; set "
                    "cache.enabled: false"
                )
            return theirs(q, k, v, layer, batch, save_kv_cache)
        if save_kv_cache and k is not None:
            location = KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc)
            pool.set_kv_buffer(layer, location, k, v)
        heads, size = layer.tp_q_head_num, layer.qk_head_dim
        query = q.view(-1, heads, size)
        out: torch.Tensor = q.new_empty(len(query), heads, layer.v_head_dim)
        keys = pool.get_key_buffer(layer.layer_id)
        values = pool.get_value_buffer(layer.layer_id)
        if keys.dtype != query.dtype:
            raise NotImplementedError(
                f"KV in {keys.dtype} with activations in {query.dtype} is not supported on a CPU"
            )
        segments.attend(query, keys, values, layer.scaling, out)
        return out.view(len(query), -1)


def _special(layer: Any) -> bool:
    window = layer.sliding_window_size
    encodes = layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY
    return encodes or (window is not None and window > -1)


def _drafted(
    spec_info: Any, contexts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], dict[int, NDArray[np.bool_]]]:
    """Return each row's tokens and masks: of our drafts, or of another algorithm's trees."""
    own = getattr(spec_info, "counts", None)
    if own is not None:
        return own, spec_info.masks
    width = int(spec_info.draft_token_num)
    flat, at = spec_info.custom_mask.numpy(), 0
    masks = {}
    for row, context in enumerate(contexts.tolist()):
        size = width * (context + width)
        masks[row] = flat[at : at + size].reshape(width, -1)[:, context:].astype(np.bool_)
        at += size
    return np.full(len(contexts), width, np.int64), masks


def register_attention() -> None:
    """Register the backend with SGLang by its name."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    add_attention_backend_choices([CPU_ATTENTION])
    register_attention_backend(CPU_ATTENTION)(TreeAttention)


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
        """Reserve KV for the places of a step only, or raise ValueError for invalid arguments."""
        if not server_args.speculative_num_draft_tokens:
            raise ValueError(f"speculative_algorithm={NAME} needs speculative_num_draft_tokens")
        server_args.speculative_eagle_topk = server_args.speculative_num_steps = 1
        server_args.enable_mixed_chunk = False
        if server_args.device == "cpu":
            server_args.disable_overlap_schedule = True
            server_args.attention_backend = CPU_ATTENTION
        elif server_args.attention_backend not in (None, "triton"):
            raise ValueError(
                f"attention_backend={server_args.attention_backend} cannot verify draft trees; "
                "leave it out (triton), or set cache.enabled: false"
            )
        else:
            server_args.attention_backend = "triton"


def register() -> None:
    """Register the algorithm and the attention for CPUs, before SGLang reads its arguments."""

    def worker(_server_args: Any) -> type:
        from asyncrl.engine.sglang.worker.drafts.spec_worker import SpecWorker

        return SpecWorker

    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=Algorithm)(worker)
    register_attention()
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
