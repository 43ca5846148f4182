"""Attention on a CPU for SGLang's batches, with drafted chains and trees (sglang 0.5.23).

SGLang's attention for drafts needs GPU kernels, or CPU kernels in `sgl_kernel`, which PyPI lacks
for this build; its `torch_native`, the base class here, attends causally with one number of tokens
per row. Here a forward pass is described once, for all layers, as segments (`worker.segments`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from asyncrl.engine.sglang.messages import CPU_ATTENTION
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

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Attend with all tokens of a forward pass, after their KV is in the pool."""
        segments = self._segments
        if segments is None or _special(layer):
            if forward_batch.forward_mode.is_target_verify():
                raise NotImplementedError(
                    "drafts on a CPU are not possible with layers of a sliding window or an "
                    "encoder; set cache.enabled: false"
                )
            extended: torch.Tensor = super().forward_extend(
                q, k, v, layer, forward_batch, save_kv_cache
            )
            return extended
        return self._attend(segments, q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Attend with a batch of one token per row, which SGLang runs without speculation."""
        segments = self._segments
        if segments is None or _special(layer):
            decoded: torch.Tensor = super().forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache
            )
            return decoded
        return self._attend(segments, q, k, v, layer, forward_batch, save_kv_cache)

    def _attend(
        self, segments: Segments, q: Any, k: Any, v: Any, layer: Any, batch: Any, save: bool
    ) -> torch.Tensor:
        pool = self.token_to_kv_pool
        if save and k is not None:
            location = KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc)
            pool.set_kv_buffer(layer, location, k, v)
        heads, size = layer.tp_q_head_num, layer.qk_head_dim
        query = q.view(-1, heads, size)
        out: torch.Tensor = q.new_empty(len(query), heads, layer.v_head_dim)
        keys = pool.get_key_buffer(layer.layer_id)
        values = pool.get_value_buffer(layer.layer_id)
        if keys.dtype != query.dtype:
            raise NotImplementedError(
                f"KV in {keys.dtype} with activations in {query.dtype} is not possible on a CPU"
            )
        segments.attend(query, keys, values, layer.scaling, out)
        return out.view(len(query), -1)


def _special(layer: Any) -> bool:
    window = layer.sliding_window_size
    return (
        layer.is_cross_attention
        or layer.attn_type == AttentionType.ENCODER_ONLY
        or (window is not None and window > -1)
    )


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


def register() -> None:
    """Register the backend with SGLang by its name."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    add_attention_backend_choices([CPU_ATTENTION])
    register_attention_backend(CPU_ATTENTION)(TreeAttention)
