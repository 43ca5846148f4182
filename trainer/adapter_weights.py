"""A policy's weights for others, where only its adapter is trained."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from asyncrl.trainer.lora.adapter import Adapter
from asyncrl.trainer.model.policy import Policy
from asyncrl.trainer.ranks.world import World
from asyncrl.trainer.sharding.weights import Weights
from asyncrl.wire.weights.layout import Fingerprint


class AdapterWeights(Weights):
    """Of one policy and its adapter."""

    def __init__(self, policy: Policy, world: World, adapter: Adapter) -> None:
        super().__init__(policy, world)
        self._adapter = adapter

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What is published: A and B of each layer."""
        return self._adapter.tensors()

    def fingerprint(self, dtype: torch.dtype | None = None) -> Fingerprint:
        """Of the merged weights, as an engine of this data type holds them.

        Without a data type, of the model's own weights and the adapter.
        """
        return self._adapter.own() if dtype is None else self._adapter.fingerprint(dtype)


def weights_of(policy: Policy, world: World) -> Weights:
    """Those of a policy with an adapter or without."""
    if policy.adapter is None:
        return Weights(policy, world)
    return AdapterWeights(policy, world, policy.adapter)
