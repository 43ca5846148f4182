"""New weights for a model that is serving: staged while it runs, copied in between two steps."""

from __future__ import annotations

import torch

from engine.errors import WeightsError
from engine.weights import ModelShapes, NamedTensors, StagedWeights
from wire.weights.fingerprint import fingerprint
from wire.weights.layout import Fingerprint, WeightManifest


class ModuleWeights:
    """Replaces the parameters of a loaded module in place.

    Args:
        module: whose state dict names the tensors.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._own = dict(module.state_dict(keep_vars=True))
        self._shapes = ModelShapes.of_module(module)
        self._staged = StagedWeights(self._check_tied)

    def stage(self, manifest: WeightManifest) -> None:
        """Copy a published version into staging memory; safe while the module computes.

        If it raises, nothing is staged.

        Raises:
            WeightsSupersededError: this version was overwritten by a newer one, or removed.
            WeightsError: the weights do not fit the module, or cannot be read.
        """
        self._staged.clear()
        self._shapes.check(manifest)
        self._staged.stage(manifest)

    def install(self, policy_version: int) -> None:
        """Overwrite the parameters with the staged version, converting data type and device.

        Raises:
            WeightsError: this version is not staged; nothing was changed.
        """
        with self._staged.install(policy_version) as tensors, torch.no_grad():
            for name, tensor in tensors:
                self._own[name].copy_(tensor)

    def fingerprint(self) -> Fingerprint:
        """Of the parameters as they are now, by every name of the state dict."""
        return fingerprint(self._module.state_dict(keep_vars=True).items())

    def _check_tied(self, tensors: NamedTensors) -> None:
        given = dict(tensors)
        for name, first in self._shapes.tied.items():
            both = name in given and first in given
            if both and not torch.equal(given[name], given[first]):
                raise WeightsError(f"{first!r} and {name!r} are one tied weight but differ")
