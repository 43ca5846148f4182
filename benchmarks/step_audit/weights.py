"""Weights and moments of a version, as an audit computes with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from benchmarks.step_audit.adamw import AdamW, Tensors
from benchmarks.step_audit.folder import Folder


def part_of(state: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Of a checkpoint's tensors those whose names begin so, without the beginning."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


class Weights:
    """Of a run's policies, critics and references, by version; those of 0 are the initial model."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._trainer = folder.config["trainer"]
        self._initial = part_of(folder.state(0), "weights/policy/")

    def policy(self, version: int) -> AdamW:
        """What is trained: the model's weights, or an adapter's."""
        weights = part_of(self._folder.state(version), "weights/policy/")
        if self._trainer["lora"]["rank"] and not version:
            # Before its first step B is 0, so that A has no gradient and stays what it is.
            later = part_of(self._folder.state(1), "weights/policy/")
            weights = {k: one * 0 if ".lora_B." in k else one for k, one in later.items()}
        return self._optimizer(version, "policy", weights)

    def critic(self, version: int) -> AdamW:
        """At first the initial model and a head of 0."""
        weights = part_of(self._folder.state(version), "weights/critic/")
        if not weights:
            trunk = {k.removeprefix("model."): v for k, v in self._initial.items()}
            size = next(iter(trunk.values())).shape[-1]
            head = {"head.weight": torch.zeros(1, size), "head.bias": torch.zeros(1)}
            weights = {f"trunk.{k}": v for k, v in trunk.items()} | head
        return self._optimizer(version, "critic", weights)

    def reference(self, version: int) -> Tensors:
        """Of the KL penalty in the step after this version."""
        moved = part_of(self._folder.state(version), "weights/reference/")
        return self.whole(moved or self._initial)

    def of_engines(self, version: int) -> Tensors:
        """With which tokens of this version were drawn."""
        return self.whole(part_of(self._folder.state(version), "weights/policy/"))

    def whole(self, weights: Tensors) -> Tensors:
        """The model's weights in float64; an adapter's are merged: W + alpha / rank * B A."""
        if weights.keys() <= self._initial.keys():
            return {name: one.double() for name, one in weights.items()}
        merged = {name: one.double() for name, one in self._initial.items()}
        scale = self._trainer["lora"]["alpha"] / self._trainer["lora"]["rank"]
        for name, one in weights.items():
            layer, is_b, _ = name.partition(".lora_B.")
            if is_b:
                a = weights[name.replace(".lora_B.", ".lora_A.")].double()
                merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + scale * one.double() @ a
        return merged

    def _optimizer(self, version: int, name: str, weights: Tensors) -> AdamW:
        moments = part_of(self._folder.state(version), f"optimizer/{name}/{name}/")
        return AdamW({k: v.double() for k, v in weights.items()}, moments, self._trainer)
