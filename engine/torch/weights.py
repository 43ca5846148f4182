"""New weights for a model that is serving: staged while it runs, copied in between two steps."""

from __future__ import annotations

from collections.abc import Collection

import torch

from asyncrl.engine.adapters import MergingBuffer
from asyncrl.engine.config import WeightStaging
from asyncrl.engine.errors import WeightsError
from asyncrl.engine.weights import ModelShapes, NamedTensors, StagedWeights
from asyncrl.wire.errors import WeightsReadError
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import Fingerprint, WeightManifest
from asyncrl.wire.weights.reader import WeightBuffer


class ModuleWeights:
    """Replaces the parameters of a loaded module in place.

    Whatever shares memory with a parameter, such as a fused product of which it is a view, has the
    new weights too.

    Args:
        module: whose state dict names the tensors.
        staging: where a version is staged, for a module on a GPU.
    """

    def __init__(self, module: torch.nn.Module, staging: WeightStaging = "host") -> None:
        self._module = module
        self._own = dict(module.state_dict(keep_vars=True))
        self._shapes = ModelShapes.of_module(module)
        self._device = next((one.device for one in self._own.values()), torch.device("cpu"))
        self._staging = self._device if staging == "device" else torch.device("cpu")
        self._pins = self._device.type != "cpu" and staging == "host"
        own = {name: tensor.dtype for name, tensor in self._own.items()}
        self._whole = WeightBuffer(
            lambda name, published: own.get(name, published),
            device=self._staging,
            pinned=self._pins,
            engine_device=self._device,
        )
        self._staged = StagedWeights(self._check_tied, MergingBuffer(self._whole, self._base))
        self._fingerprint: Fingerprint | None = None

    def stage(self, manifest: WeightManifest) -> None:
        """Copy a published version into staging memory, in the module's own data types.

        Safe while the module computes. If it raises, nothing is staged.

        Raises:
            WeightsSupersededError: this version was overwritten by a newer one, or removed.
            WeightsError: the weights do not fit the module, or cannot be read.
        """
        self._staged.clear()
        self._shapes.check(manifest)
        self._staged.stage(manifest)

    def install(self, policy_version: int) -> None:
        """Overwrite the parameters with the staged version. Only copies.

        Raises:
            WeightsError: this version is not staged; nothing was changed.
        """
        with self._staged.install(policy_version) as tensors, torch.no_grad():
            self._fingerprint = None
            for name, tensor in tensors:
                self._own[name].copy_(tensor, non_blocking=True)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # the staging memory may be overwritten now

    def fingerprint(self) -> Fingerprint:
        """Of the live parameters, by every name of the state dict; once after each installation."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._module.state_dict(keep_vars=True).items())
        return self._fingerprint

    def _base(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Copies of the weights that the module was loaded with, where versions are staged."""
        if self._whole.policy_version is not None:
            raise WeightsReadError(
                "the module has had whole weights, so it is not known what an adapter is added to"
            )
        found = {name: self._own[name].detach() for name in names}
        copies = {name: one.to(self._staging, copy=True) for name, one in found.items()}
        return {n: one.pin_memory() for n, one in copies.items()} if self._pins else copies

    def _check_tied(self, tensors: NamedTensors) -> None:
        given = dict(tensors)
        for name, first in self._shapes.tied.items():
            both = name in given and first in given
            if both and not torch.equal(given[name], given[first]):
                raise WeightsError(f"{first!r} and {name!r} are one tied weight but differ")
