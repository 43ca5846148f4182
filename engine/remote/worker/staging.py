"""New weights next to the running model: loaded into a second tree of modules, then copied.

An engine's loader takes several times as long as a copy, so it runs in a thread on a second tree of
the model's modules (`engine.remote.worker.shadow_model`) while tokens are generated. That both give
the same is proved before the engine becomes ready:

1. The model is loaded with numbers that all differ from its own. Nothing may change but what
   copying replaces.
2. A twin is made, filled with NaN, and loaded with the model's own weights. The model must not
   change, and the twin must then hold what the engine's start had left in the model.
3. The twin is copied into the model, which must then be as it was at the start.

Otherwise every installation loads the model in the pause, and the report says why.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from asyncrl.engine.errors import WeightsError, WeightsSupersededError
from asyncrl.engine.remote.extras import StagingReport
from asyncrl.engine.remote.worker.shadow_model import (
    Attributes,
    ShadowModel,
    differing,
    loaded_parts,
    unchanged,
)
from asyncrl.engine.weights import MergingBuffer, NamedTensors, StagedWeights, weights_of_model
from asyncrl.wire.weights.layout import WeightManifest
from asyncrl.wire.weights.reader import WeightBuffer

_SHOWN = 5
_SHIFT = 3 / 64
"""Added to numbers. Not a power of two, so it does not undo a change of the highest bit."""


class Loader(ABC):
    """Loads a checkpoint's tensors into the engine's model."""

    name: str
    """The engine's name in messages: "vLLM"."""
    model: torch.nn.Module
    """The model that decodes."""
    model_path: str
    """Directory that it was loaded from."""
    device: torch.device
    dtype: torch.dtype

    @abstractmethod
    def load(self, model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors, named as in the HF state dict, into the model or its twin, in place."""

    def adopt(self, twin: ShadowModel) -> None:  # noqa: B027
        """Prepare the engine to load into a new twin, if it needs that."""

    def forget(self, twin: ShadowModel) -> None:  # noqa: B027
        """Undo `adopt`."""

    def check_unchanged(self, names: Collection[str]) -> None:  # noqa: B027
        """Raise WeightsError if loading should have changed one of these parameters.

        `names` are keys of `loaded_parts` that loading other numbers has not changed.
        """

    def installed(self, policy_version: int) -> None:  # noqa: B027
        """Drop what the engine derived from the old weights."""


class WorkerWeights:
    """The staged weights of one rank: `prove` once, then `begin`, `report` and `install`.

    Weights are staged on the model's device if `on_device`; otherwise in host memory.
    """

    def __init__(self, loader: Loader, *, on_device: bool = False) -> None:
        self._loader = loader
        own = loader.dtype
        buffer = WeightBuffer(
            lambda _, published: own if published.is_floating_point else published,
            engine_device=loader.device,
        )
        # Loaders need all weights, not only those that adapters are added to.
        merging = MergingBuffer(buffer, lambda _names: self._own(), every=True)
        self._staged = StagedWeights(self._receive, merging)
        self._thread = ThreadPoolExecutor(
            1, "asyncrl-staging", initializer=partial(_use_device, loader.device)
        )
        self._staging: Future[None] | None = None
        self._twin_device = loader.device if on_device else torch.device("cpu")
        self._twin: ShadowModel | None = None
        self._why_reloads = "copying was not proved equal to loading"

    def _own(self) -> dict[str, torch.Tensor]:
        """Return the weights that the model was started with, by their published names."""
        return weights_of_model(self._loader.model_path, self._loader.dtype)

    def prove(self) -> None:
        """Find out whether all later versions can be copied from a twin; it may take minutes.

        The model has its initial weights, before and afterwards; nothing is served. Raises
        WeightsReadError if transformers cannot load the initial weights; WeightsError if the engine
        cannot load weights into this model, or loading the same ones does not restore its state.
        """
        model, own = self._loader.model, list(self._own().items())
        with torch.inference_mode():
            started = loaded_parts(model)
            try:
                self._twin, found = self._proved(model, started, own)
            except WeightsError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever loaders raise; it is reported
                self._why_reloads = self._cannot(error)
            else:
                if self._twin is not None:
                    self._why_reloads = ""
                    return
                self._why_reloads = (
                    f"copying would not reproduce what {self._loader.name}'s loader does to "
                    f"{first_of(found)}"
                )
            self._loader.load(model, own)
            left = differing(started, loaded_parts(model))
        if left:
            raise WeightsError(
                f"{self._loader.name} cannot install new weights: after it loaded its initial "
                f"weights again, these differ: {first_of(left)} ({self._why_reloads})"
            )

    def _proved(
        self, model: torch.nn.Module, started: dict[str, Any], own: NamedTensors
    ) -> tuple[ShadowModel | None, list[str]]:
        """Return a twin and no names, or None and the names of what copying would not reproduce.

        With a twin, the model is as at the start, with `own` weights and `loaded_parts` `started`.
        """
        attributes = Attributes(model)
        self._loader.load(model, other_numbers(own))
        found = attributes.changed()
        if found:
            return None, found
        others = loaded_parts(model)
        untouched = unchanged(started, others)
        self._loader.check_unchanged(untouched)
        twin = ShadowModel(model, self._twin_device, untouched)
        try:
            self._loader.adopt(twin)
            twin.poison()
            self._loader.load(twin.model, own)
            found = attributes.changed() + twin.differences(started)
            if len(unchanged(others, loaded_parts(model))) < len(others):
                found.append("the model itself, while it loads a copy of it")
            if not found:
                twin.install()
                found = differing(started, loaded_parts(model))
        except BaseException:
            self._forget(twin)
            raise
        if found:
            self._forget(twin)
        return (None if found else twin), found

    def begin(self, manifest: WeightManifest) -> None:
        """Begin to stage a published version."""
        self._staging = self._thread.submit(self._staged.stage, manifest)

    def report(self) -> StagingReport:
        """Return the state of the staging begun last. Raises its unexpected errors."""
        if self._staging is None:
            raise WeightsError("no weights are being staged: call begin_staging first")
        if not self._staging.done():
            return StagingReport("running")
        try:
            self._staging.result()
        except WeightsSupersededError as error:
            return StagingReport("superseded", str(error))
        except WeightsError as error:
            return StagingReport("refused", str(error))
        return StagingReport("staged")

    def install(self, policy_version: int) -> str:
        """Put the staged version into the model's layers; only while generation is paused.

        Returns as `RemoteWorker.asyncrl_install`. Raises WeightsError if this version is not
        staged.
        """
        with self._staged.install(policy_version) as tensors, torch.inference_mode():
            if self._twin is not None:
                self._twin.install()
            else:
                self._loader.load(self._loader.model, tensors)
        self._loader.installed(policy_version)
        return self._why_reloads

    def _forget(self, twin: ShadowModel) -> None:
        self._loader.forget(twin)
        twin.close()

    def _cannot(self, error: Exception) -> str:
        name = self._loader.name
        return f"{name} cannot load into a copy of its modules: {type(error).__name__}: {error}"

    def _receive(self, tensors: NamedTensors) -> None:
        """Check tensors that were read, and load them into the twin. Runs in the thread."""
        check_finite(tensors)
        twin = self._twin
        if twin is None:
            return
        try:
            with torch.inference_mode():
                self._loader.load(twin.model, tensors)
                if self._loader.device.type == "cuda":  # the thread's stream is not the model's
                    torch.cuda.synchronize(self._loader.device)
        except Exception as error:  # noqa: BLE001 - whatever loaders raise; it is reported
            self._twin, self._why_reloads = None, self._cannot(error)
            self._forget(twin)


def _use_device(device: torch.device) -> None:
    """Set the device of a new thread, which would otherwise be the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def first_of(names: list[str]) -> str:
    """Return the first names of a list for a message, with the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def other_numbers(tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of tensors with other finite values in every place, one by one.

    The mantissa's highest bit is flipped, which changes all but zeros and subnormal numbers by a
    quarter or more; `_SHIFT` changes those. Numbers are finite and have 2 or 4 bytes; tensors that
    are not floating-point stay.
    """
    for name, tensor in tensors:
        if tensor.is_floating_point():
            integer = {2: torch.int16, 4: torch.int32}[tensor.itemsize]
            highest = round(0.5 / torch.finfo(tensor.dtype).eps)
            other = tensor.clone()
            other.view(integer).bitwise_xor_(highest)
            yield name, other.add_(_SHIFT)
        else:
            yield name, tensor


def check_finite(tensors: NamedTensors) -> None:
    """Raise WeightsError if a value is infinite or NaN: the model would sample nonsense."""
    for name, tensor in tensors:
        # One pass without a mask in memory; both ends are NaN if any value is.
        if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            raise WeightsError(
                f"weight {name!r} has values that are not finite; the engine keeps its weights"
            )
