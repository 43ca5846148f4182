"""The compiled forward pass of `asyncrl.engine.torch.cpu.fused_model`: all layers in one call.

    embed + norm -> [qkv, rotate_and_store, attend, o, add_and_norm, gate and up, gated, down,
                     add_and_norm] x layers -> head

Shapes: N layers, T packed tokens, C hidden size, I intermediate size, H query heads, J key/value
heads, D head size, V vocabulary, S slots, W wanted tokens. All numbers are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asyncrl.engine.torch.attention_mask import BoolArray
from asyncrl.engine.torch.cpu.blas import multiply
from asyncrl.engine.torch.cpu.fused_kernels import add_and_norm, attend, embed, rotate_and_store
from asyncrl.rollout.cpu.fused_kernels import LongArray, gated
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray

kernel = kernels_of("engine/torch", "rollout")


class Weights(NamedTuple):
    """What a model computes with. A bias or a norm that the model lacks has 0 columns."""

    table: FloatArray
    """`[V, C]` embeddings."""
    before_attention: FloatArray
    """`[N, C]` of the norm."""
    qkv: FloatArray
    """`[N, (H + 2 J) D, C]`"""
    qkv_bias: FloatArray
    of_queries: FloatArray
    """`[N, D]` of the norm of each query head."""
    of_keys: FloatArray
    """`[N, D]`"""
    output: FloatArray
    """`[N, C, H D]`"""
    output_bias: FloatArray
    before_mlp: FloatArray
    """`[N, C]` of the norm."""
    gate_up: FloatArray
    """`[N, 2 I, C]`"""
    gate_up_bias: FloatArray
    down: FloatArray
    """`[N, C, I]`"""
    down_bias: FloatArray
    last_norm: FloatArray
    """`[C]`"""
    head: FloatArray
    """`[V, C]`"""
    head_bias: FloatArray
    cosines: FloatArray
    """`[positions, D]` of the rotary embedding."""
    sines: FloatArray
    """`[positions, D]`"""
    epsilon: np.float32
    """Of all norms."""
    scale: np.float32
    """Of attention scores."""
    heads: int
    """H."""


class Places(NamedTuple):
    """Where the tokens of a pass lie and what they attend to (`engine.torch.attention_mask`)."""

    position: LongArray
    """`[T]` in their contexts."""
    slot: LongArray
    first: LongArray
    last: LongArray
    base: LongArray
    hidden: BoolArray


class Buffers(NamedTuple):
    """Memory of a pass: at least as many rows as are fed. What no kernel writes is finite."""

    states: FloatArray
    """`[rows, C]`"""
    change: FloatArray
    """`[rows, C]` input and output of products."""
    packed: FloatArray
    """`[rows, (H + 2 J) D]` queries, keys and values."""
    attended: FloatArray
    """`[rows, H D]`"""
    both: FloatArray
    """`[rows, 2 I]` gates and what they let through."""
    gated: FloatArray
    """`[rows, I]`"""


@kernel.of_vectors
def forward(
    sgemm: int,
    weights: Weights,
    ids: LongArray,
    places: Places,
    wanted: LongArray,
    fed: int,
    keys: FloatArray,
    values: FloatArray,
    buffers: Buffers,
    logits: FloatArray,
) -> None:
    """Compute the logits after the wanted tokens; the KV of all tokens is written to its places.

    Args:
        sgemm: `asyncrl.engine.torch.cpu.blas.sgemm_address`.
        weights: of the model.
        ids: `[T]` tokens.
        places: of the tokens.
        wanted: `[W]` ascending indices into `[T]`. The last layer computes only these.
        fed: rows of the products, at least T: the rows after T are padding.
        keys: `[N, S, J, L, D]`; `[1, ...]`: not kept, each layer overwrites those before.
        values: as `keys`.
        buffers: with at least `fed` rows, and as many as `logits` has.
        logits: `[W or more, V]`: rows after W are padding.
    """
    w, count = weights, len(weights.qkv)
    states, change = buffers.states[: len(ids)], buffers.change[:fed]
    embed(ids, w.table, w.before_attention[0], w.epsilon, states, change)
    chosen = np.arange(len(ids))
    for layer in range(count):
        packed, at = buffers.packed[:fed], layer % len(keys)
        multiply(sgemm, change, w.qkv[layer], w.qkv_bias[layer], packed)
        rotate_and_store(
            packed, w.heads, w.of_queries[layer], w.of_keys[layer], w.epsilon, w.cosines, w.sines,
            places.position, places.slot, places.last, keys[at], values[at],
        )  # fmt: skip
        norm_after = w.last_norm
        if layer + 1 < count:
            norm_after = w.before_attention[layer + 1]
        else:
            chosen, fed = wanted, len(logits)
            for i in range(len(wanted)):  # ascending: none is overwritten before it is read
                states[i] = states[wanted[i]]
            states, change = states[: len(wanted)], buffers.change[:fed]
        attended = buffers.attended[:fed]
        attend(
            packed, w.heads, chosen, keys[at], values[at],
            places.slot, places.first, places.last, places.base, places.hidden, w.scale, attended,
        )  # fmt: skip
        multiply(sgemm, attended, w.output[layer], w.output_bias[layer], change)
        add_and_norm(states, change, w.before_mlp[layer], w.epsilon)
        both, narrow = buffers.both[:fed], buffers.gated[:fed]
        multiply(sgemm, change, w.gate_up[layer], w.gate_up_bias[layer], both)
        gated(both, narrow)
        multiply(sgemm, narrow, w.down[layer], w.down_bias[layer], change)
        add_and_norm(states, change, norm_after, w.epsilon)
    multiply(sgemm, change, w.head, w.head_bias, logits)
