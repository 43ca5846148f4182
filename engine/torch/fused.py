"""A forward pass of Llama-like models on a CPU core, in as few calls as possible.

A small model's decode step is bound by the number of operations: transformers' forward pass of a
layer is about 40 of them, each some microseconds of Python and dispatch. Here a layer is four
matrix products (queries, keys and values at once; output; gate and up at once; down) and three
compiled loops (`engine.torch.fused_kernels`), on buffers that stay. The last layer computes only
the tokens whose logits are wanted.

    embed + norm -> [qkv, rotate_and_store, attend, o, add_and_norm, gate and up, gated, down,
                     add_and_norm] x layers -> head

The weights of fused products are rows of one tensor, and the module's parameters become views of
it. So there is one copy of each weight, and installed weights are used at once.

`rollout.fused` says which models have it. All others run through transformers' forward pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from engine.errors import EngineError
from engine.torch import fused_kernels as kernels
from engine.torch.invariant import missing
from engine.torch.reach import Reach
from engine.torch.slots import SlotCache
from rollout import fused_kernels as common
from rollout.trajectory import FloatArray


class _Product:
    """One matrix product for some linear layers with the same input; their weights become views."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.weight = _joined([layer.weight.detach() for layer in layers])
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = _joined(biases) if biases else None
        start = 0
        for layer in layers:
            rows = slice(start, start + layer.out_features)
            layer.weight.data = self.weight[rows]
            if self.bias is not None:
                layer.bias.data = self.bias[rows]
            start += layer.out_features
        self._turned = self.weight.t()

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self.bias is None:
            torch.mm(x, self._turned, out=out)
        else:
            torch.addmm(self.bias, x, self._turned, out=out)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Norm:
    """Weight and epsilon of an RMS norm, as kernels take them."""

    def __init__(self, module: Any) -> None:
        self.weight: FloatArray = np.empty(0, np.float32)
        self.epsilon = np.float32(0)
        if module is not None:
            self.weight = module.weight.detach().numpy()
            self.epsilon = np.float32(module.variance_epsilon)


class _Layer:
    """What a layer computes with."""

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.qkv = _Product(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = _Product(attention.o_proj)
        self.gate_up = _Product(mlp.gate_proj, mlp.up_proj)
        self.down = _Product(mlp.down_proj)
        self.before_attention = _Norm(module.input_layernorm)
        self.before_mlp = _Norm(module.post_attention_layernorm)
        self.of_queries = _Norm(getattr(attention, "q_norm", None))
        self.of_keys = _Norm(getattr(attention, "k_norm", None))
        self.scale = np.float32(attention.scaling)


class _Buffer:
    """A matrix as a tensor and as an array, for as many rows as any step has needed."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._tensor = torch.empty(0, columns)
        self._array: FloatArray = self._tensor.numpy()

    def first(self, rows: int) -> tuple[torch.Tensor, FloatArray]:
        """`[rows, columns]`, with what was last written; what no kernel writes is finite."""
        if rows > len(self._array):
            self._tensor = torch.zeros(2 * rows, self._columns)
            self._array = self._tensor.numpy()
        return self._tensor[:rows], self._array[:rows]


class FusedDecoder:
    """The forward pass of one model. See `rollout.fused`.

    Args:
        model: of a family in `rollout.fused`, float32, on a CPU. Its weights become views.
        cache: its KV slots, allocated.
        batch_invariant: whether a row's logits must not depend on what else is in the batch
            (`engine.torch.invariant`): products then see whole blocks of rows.
    """

    def __init__(self, model: Any, cache: SlotCache, *, batch_invariant: bool = False) -> None:
        self._cache = cache
        self._invariant = batch_invariant
        inner, config = model.model, model.config
        self._layers = [_Layer(layer) for layer in inner.layers]
        self._head = _Product(model.lm_head)
        self._table: FloatArray = inner.embed_tokens.weight.detach().numpy()
        self._last_norm = _Norm(inner.norm)
        self._heads: int = config.num_attention_heads
        _, self._kv_heads, _, self._size = cache.keys[0].shape
        positions = torch.arange(cache.max_len)[None]
        self._cosines, self._sines = (
            table[0].contiguous().numpy()
            for table in inner.rotary_emb(torch.empty(0), position_ids=positions)
        )
        self._states, self._changes = (_Buffer(config.hidden_size) for _ in range(2))
        self._packed = _Buffer((self._heads + 2 * self._kv_heads) * self._size)
        self._attended = _Buffer(self._heads * self._size)
        self._both = _Buffer(2 * config.intermediate_size)
        self._gated = _Buffer(config.intermediate_size)

    def forward(
        self,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        reach: Reach,
        wanted: NDArray[np.int64],
    ) -> torch.Tensor:
        """Logits `[len(wanted), V]` after some of the tokens, whose KV is written to the slots.

        Args:
            ids: `[T]` tokens.
            positions: `[T]` in their contexts.
            reach: what each attends to; if it is `packed`, no slot is used.
            wanted: indices into `[T]`.

        Raises:
            EngineError: a position is beyond the slots.
        """
        everyone = np.arange(len(ids))
        if len(ids) and positions.max() >= len(self._cosines):
            raise EngineError(
                f"position {positions.max()} is beyond the {len(self._cosines)} places of a slot"
            )
        layers = self._layers
        fed = self._filled_up(len(ids))
        states = self._states.first(fed)[1][: len(ids)]
        normed, normed_array = self._changes.first(fed)
        first = layers[0].before_attention
        kernels.embed(ids, self._table, first.weight, first.epsilon, states, normed_array)
        for index, layer in enumerate(layers):
            packed, packed_array = self._packed.first(fed)
            layer.qkv(normed, packed)
            keys, values = self._slots(index, reach, len(ids))
            kernels.rotate_and_store(
                packed_array, self._heads, layer.of_queries.weight, layer.of_keys.weight,
                layer.of_queries.epsilon, self._cosines, self._sines,
                positions, reach.slot, reach.last, keys, values,
            )  # fmt: skip
            chosen = everyone
            if index + 1 == len(layers):
                chosen, after = wanted, self._last_norm
                states[: len(wanted)] = states[wanted]
            else:
                after = layers[index + 1].before_attention
            fed = self._filled_up(len(chosen))
            attended, attended_array = self._attended.first(fed)
            kernels.attend(
                packed_array, self._heads, chosen, keys, values,
                reach.slot, reach.first, reach.last, reach.base, reach.hidden,
                layer.scale, attended_array,
            )  # fmt: skip
            normed = self._rest(layer, attended, states[: len(chosen)], after)
        logits = torch.empty(fed, len(self._head.weight))
        self._head(normed, logits)
        return logits[: len(wanted)]

    def _filled_up(self, tokens: int) -> int:
        return tokens + missing(tokens) if self._invariant else tokens

    def _rest(
        self, layer: _Layer, attended: torch.Tensor, states: FloatArray, after: _Norm
    ) -> torch.Tensor:
        """What follows attention in a layer; gives its normed output, the next layer's input."""
        fed = len(attended)
        change, change_array = self._changes.first(fed)
        both, both_array = self._both.first(fed)
        gated, gated_array = self._gated.first(fed)
        layer.output(attended, change)
        norm = layer.before_mlp
        kernels.add_and_norm(states, change_array, norm.weight, norm.epsilon)
        layer.gate_up(change, both)
        common.gated(both_array, gated_array)
        layer.down(gated, change)
        kernels.add_and_norm(states, change_array, after.weight, after.epsilon)
        return change

    def _slots(self, layer: int, reach: Reach, count: int) -> tuple[FloatArray, FloatArray]:
        """Where keys and values of a layer are written and read: `[S, J, L, D]` each."""
        if reach.packed:
            shape = (1, self._kv_heads, count, self._size)
            return np.empty(shape, np.float32), np.empty(shape, np.float32)
        return self._cache.keys[layer].numpy(), self._cache.values[layer].numpy()
