"""The size of an adapter. Pure arithmetic; no torch."""

from __future__ import annotations

from typing import Protocol

from asyncrl.trainer.base.lora_config import LoraConfig


class Shape(Protocol):
    """The used part of `asyncrl.trainer.model.memory_estimate.ModelShape`."""

    @property
    def hidden(self) -> int:
        """Size of a hidden state."""

    @property
    def layers(self) -> int:
        """Number of blocks."""

    @property
    def intermediate(self) -> int:
        """Width between the MLP's matrices."""

    @property
    def heads(self) -> int:
        """Query heads."""

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""

    @property
    def head_size(self) -> int:
        """Numbers of a head."""


def adapter_parameters(shape: Shape, config: LoraConfig) -> int:
    """Count the parameters of A and B; a layer of another name counts as one of the MLP's."""
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
