"""How large an adapter is. Pure arithmetic; no torch."""

from __future__ import annotations

from typing import Protocol

from asyncrl.trainer.base.lora_config import LoraConfig


class Shape(Protocol):
    """What `asyncrl.trainer.model.memory_estimate.ModelShape` says of a model."""

    @property
    def hidden(self) -> int:
        """Numbers of a hidden state."""

    @property
    def layers(self) -> int:
        """Blocks."""

    @property
    def intermediate(self) -> int:
        """Numbers between the MLP's matrices."""

    @property
    def heads(self) -> int:
        """Of queries."""

    @property
    def kv_heads(self) -> int:
        """Of keys and values."""

    @property
    def head_size(self) -> int:
        """Numbers of each."""


def adapter_parameters(shape: Shape, config: LoraConfig) -> int:
    """Parameters of A and B of all layers of a Llama-like model.

    A target of another name is taken for one of the MLP's.
    """
    hidden, middle = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sizes = {
        "q_proj": hidden + queries,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": queries + hidden,
        "gate_proj": hidden + middle,
        "up_proj": hidden + middle,
        "down_proj": middle + hidden,
    }
    if isinstance(config.targets, str):
        block = sum(sizes.values())
    else:
        block = sum(sizes.get(name, hidden + middle) for name in config.targets)
    return config.rank * block * shape.layers
