"""A forward pass of Llama-like models on a CPU core, in as few calls as possible.

A small model's decode step is bound by the number of operations. Here the whole pass is one
compiled call: a layer is four matrix products and three loops, on persistent buffers. The last
layer computes only the tokens whose logits are wanted.

    embed + norm -> [qkv, rotate_and_store, attend, o, add_and_norm, gate and up, gated, down,
                     add_and_norm] x layers -> head

The weights of fused products are rows of one tensor, and the module's parameters become views of
it, so installed weights are used at once. `rollout.cpu` lists the models.

Shapes: N layers, T packed tokens, C hidden size, I intermediate size, H query heads, J key/value
heads, D head size, V vocabulary, S slots, W wanted tokens. All numbers are float32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from asyncrl.engine.errors import EngineError
from asyncrl.engine.torch.attention import AttendedKeys
from asyncrl.engine.torch.cpu.fused_kernels import (
    add_and_norm,
    attend,
    embed,
    multiply,
    rotate_and_store,
    sgemm_address,
)
from asyncrl.engine.torch.cpu.invariant_attention import missing
from asyncrl.engine.torch.slots import SlotCache
from asyncrl.rollout.cpu import LongArray, gated
from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray

kernel = kernels_of("engine/torch", "rollout")


class Weights(NamedTuple):
    """The model's weights. A bias or a norm that the model lacks has 0 columns."""

    table: FloatArray
    """`[V, C]` embeddings."""
    before_attention: FloatArray
    qkv: FloatArray
    """`[N, (H + 2 J) D, C]`"""
    qkv_bias: FloatArray
    of_queries: FloatArray
    """`[N, D]` weight of the norm of each query head."""
    of_keys: FloatArray
    """`[N, D]`"""
    output: FloatArray
    """`[N, C, H D]`"""
    output_bias: FloatArray
    before_mlp: FloatArray
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
    sines: FloatArray
    """`[positions, D]`"""
    epsilon: np.float32
    scale: np.float32
    heads: int
    """H."""


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
    """`[rows, 2 I]` gates and the values that they scale."""
    gated: FloatArray
    """`[rows, I]`"""


@kernel.of_vectors
def forward(
    sgemm: int,
    weights: Weights,
    ids: LongArray,
    positions: LongArray,
    reach: AttendedKeys,
    wanted: LongArray,
    fed: int,
    keys: FloatArray,
    values: FloatArray,
    buffers: Buffers,
    logits: FloatArray,
) -> None:
    """Compute the logits after the wanted tokens; the KV of all tokens is written to its places.

    `sgemm` is `fused_kernels.sgemm_address`; `ids` and `positions` are `[T]`, `wanted` `[W]`
    ascending indices into them: the last layer computes only these. `fed` rows, at least T, go
    through the products; the rest is padding. `keys` and `values` are `[N, S, J, L, D]`; with N = 1
    they are not kept: each layer overwrites those before. `buffers` have at least `fed` rows, and
    as many as `logits` `[W or more, V]`.
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
            positions, reach.slot, reach.last, keys[at], values[at],
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
            reach.slot, reach.first, reach.last, reach.base, reach.hidden, w.scale, attended,
        )  # fmt: skip
        multiply(sgemm, attended, w.output[layer], w.output_bias[layer], change)
        add_and_norm(states, change, w.before_mlp[layer], w.epsilon)
        both, narrow = buffers.both[:fed], buffers.gated[:fed]
        multiply(sgemm, change, w.gate_up[layer], w.gate_up_bias[layer], both)
        gated(both, narrow)
        multiply(sgemm, narrow, w.down[layer], w.down_bias[layer], change)
        add_and_norm(states, change, norm_after, w.epsilon)
    multiply(sgemm, change, w.head, w.head_bias, logits)


_NOTHING: FloatArray = np.empty(0, np.float32)


class FusedDecoder:
    """The forward pass of one model of `asyncrl.rollout.cpu`, float32, on a CPU.

    The model's weights become views. The slots of `cache` must be allocated; their content is lost.
    If `batch_invariant`, products see whole blocks of rows. Raises EngineError without a `sgemm_`.
    """

    def __init__(self, model: Any, cache: SlotCache, *, batch_invariant: bool = False) -> None:
        address = sgemm_address()
        if address is None:
            raise EngineError("torch's BLAS has no sgemm_: set engine.torch.fused: false")
        self._sgemm = address
        self._invariant = batch_invariant
        self._keys, self._values = (kept.numpy() for kept in cache.join_layers())
        self._weights = _weights_of(model, cache.max_len)
        self._buffers = self._buffers_of(0)

    def forward(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        reach: AttendedKeys,
        wanted: NDArray[np.int64],
    ) -> torch.Tensor:
        """Return logits `[len(wanted), V]` after some of `[T]` tokens; all KV goes to the slots.

        If `reach` is `packed`, no slot is used. Raises EngineError for a position beyond the slots.
        """
        weights = self._weights
        if len(ids) and positions.max() >= len(weights.cosines):
            raise EngineError(
                f"position {positions.max()} is beyond the {len(weights.cosines)} places of a slot"
            )
        fed, last = self._filled_up(len(ids)), self._filled_up(len(wanted))
        if max(fed, last) > len(self._buffers.states):
            self._buffers = self._buffers_of(2 * max(fed, last))
        keys, values = self._keys, self._values
        if reach.packed:
            shape = (1, 1, keys.shape[2], len(ids), keys.shape[4])
            keys, values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        logits = torch.empty(last, len(weights.head))
        forward(
            self._sgemm, weights, ids, positions, reach, wanted, fed, keys, values,
            self._buffers, logits.numpy(),
        )  # fmt: skip
        return logits[: len(wanted)]

    def _filled_up(self, tokens: int) -> int:
        return tokens + missing(tokens) if self._invariant else tokens

    def _buffers_of(self, rows: int) -> Buffers:
        w = self._weights
        hidden, packed = w.table.shape[1], w.qkv.shape[1]
        widths = (hidden, hidden, packed, w.output.shape[2], w.gate_up.shape[1], w.down.shape[2])
        return Buffers(*(np.zeros((rows, width), np.float32) for width in widths))


def _weights_of(model: Any, positions: int) -> Weights:
    """Join the weights of all layers in tensors, of which the model's become views."""
    inner, config = model.model, model.config
    layers = list(inner.layers)
    attentions, mlps = [one.self_attn for one in layers], [one.mlp for one in layers]
    qkv, qkv_bias = _linear([(one.q_proj, one.k_proj, one.v_proj) for one in attentions])
    output, output_bias = _linear([(one.o_proj,) for one in attentions])
    gate_up, gate_up_bias = _linear([(one.gate_proj, one.up_proj) for one in mlps])
    down, down_bias = _linear([(one.down_proj,) for one in mlps])
    cosines, sines = (
        table[0].contiguous().numpy()
        for table in inner.rotary_emb(torch.empty(0), position_ids=torch.arange(positions)[None])
    )
    head_bias = model.lm_head.bias
    return Weights(
        table=inner.embed_tokens.weight.detach().numpy(),
        before_attention=_joined([[one.input_layernorm.weight] for one in layers]),
        qkv=qkv,
        qkv_bias=qkv_bias,
        of_queries=_norms([getattr(one, "q_norm", None) for one in attentions]),
        of_keys=_norms([getattr(one, "k_norm", None) for one in attentions]),
        output=output,
        output_bias=output_bias,
        before_mlp=_joined([[one.post_attention_layernorm.weight] for one in layers]),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=down,
        down_bias=down_bias,
        last_norm=inner.norm.weight.detach().numpy(),
        head=model.lm_head.weight.detach().numpy(),
        head_bias=_NOTHING if head_bias is None else head_bias.detach().numpy(),
        cosines=cosines,
        sines=sines,
        epsilon=np.float32(config.rms_norm_eps),
        scale=np.float32(attentions[0].scaling),
        heads=config.num_attention_heads,
    )


def _linear(layers: list[tuple[nn.Linear, ...]]) -> tuple[FloatArray, FloatArray]:
    """Join weights `[N, out, in]` and biases `[N, out or 0]` of products over the same input."""
    weight = _joined([[one.weight for one in product] for product in layers])
    of_layers: list[list[torch.Tensor | None]] = [
        [one.bias for one in product] for product in layers
    ]
    biases = [[one for one in product if one is not None] for product in of_layers]
    return weight, _joined(biases)


def _norms(modules: list[Any]) -> FloatArray:
    """Join weights `[N, D]` of norms; `[N, 0]`: there are none."""
    return _joined([[] if one is None else [one.weight] for one in modules])


def _joined(layers: Sequence[Sequence[torch.Tensor]]) -> FloatArray:
    """Stack the parameters of each layer, `[N, sum of rows, ...]`; each becomes a view at once."""
    if not layers[0]:
        return np.empty((len(layers), 0), np.float32)
    rows = sum(len(one) for one in layers[0])
    joined = torch.empty(len(layers), rows, *layers[0][0].shape[1:])
    for layer, parameters in zip(joined, layers, strict=True):
        start = 0
        for one in parameters:
            part = layer[start : start + len(one)]
            part.copy_(one.detach())
            one.data = part
            start += len(one)
    return joined.numpy()
