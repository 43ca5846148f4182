"""New weights in an engine: checks against the model, merged adapters, staging memory."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.engine.errors import EngineStartError, WeightsError, WeightsSupersededError
from asyncrl.wire import errors as wire
from asyncrl.wire.weights.adapter import adapter_mistakes, merge, pairs_of
from asyncrl.wire.weights.layout import WeightManifest
from asyncrl.wire.weights.pretrained import causal_lm_without_weights, load_causal_lm
from asyncrl.wire.weights.reader import WeightBuffer

NamedTensors = list[tuple[str, Tensor]]
"""Tensors by their names in the HF state dict."""

_SHOWN = 5
_BASE_SECONDS, _BYTES_PER_SECOND = 60.0, 0.3e9


def longest_installation(nbytes: int, at_least: float = 0.0) -> float:
    """Return the time limit in seconds for another process to stage weights, or to install them.

    It is more than twice the computed time of both (docs/trainer.md). `nbytes` is the size of all
    weights, even if a rank takes a part of them.
    """
    return max(at_least, _BASE_SECONDS + nbytes / _BYTES_PER_SECOND)


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """Names and shapes of a model's HF state dict, tied names included."""

    shapes: dict[str, tuple[int, ...]]
    needed: frozenset[str]
    """One name of each parameter; the first of tied names."""
    tied: dict[str, str]
    """Further names of tied tensors, each with the first name of its tensor."""

    @property
    def elements(self) -> int:
        """Number of elements of all parameters, tied ones once."""
        return sum(math.prod(self.shapes[name]) for name in self.needed)

    @classmethod
    def of_module(cls, module: torch.nn.Module) -> ModelShapes:
        """Read the shapes of a loaded model."""
        state = module.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(state.items())}
        parameters = {id(parameter) for parameter in module.parameters()}
        return cls(
            {name: tuple(tensor.shape) for name, tensor in state.items()},
            frozenset(name for key, name in first.items() if key in parameters),
            {name: first[id(t)] for name, t in state.items() if first[id(t)] != name},
        )

    @classmethod
    def of_path(cls, model_path: str) -> ModelShapes:
        """Read the shapes that a model's configuration describes, or raise EngineStartError."""
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
            model = causal_lm_without_weights(config)
        except (OSError, ValueError, KeyError) as error:
            raise EngineStartError(f"cannot read the model {model_path!r}: {error}") from error
        return cls.of_module(model)

    def check(self, manifest: WeightManifest) -> None:
        """Raise WeightsError unless the manifest has every tensor once, in its shape.

        For an adapter, each pair must fit a matrix of the model.
        """
        given = {spec.name: spec.shape for spec in manifest.tensors}
        times = Counter(spec.name for spec in manifest.tensors)
        _refuse("weights given twice", [name for name, n in times.items() if n > 1])
        if manifest.lora is not None:
            mistakes = adapter_mistakes(given, self.shapes, manifest.lora.rank)
            _refuse("an adapter that does not fit the model", mistakes)
            return
        _refuse("unexpected weights (not in the model)", [n for n in given if n not in self.shapes])
        wrong = [
            f"{name}: {shape} given, {self.shapes[name]} needed"
            for name, shape in given.items()
            if shape != self.shapes[name]
        ]
        _refuse("weights of a wrong shape", wrong)
        _refuse("missing weights", sorted(self.needed - given.keys()))


def _refuse(what: str, wrong: list[str]) -> None:
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise WeightsError(
            f"{what}: {', '.join(wrong[:_SHOWN])}{more}; the engine keeps its weights"
        )


Base = Callable[[Collection[str]], Mapping[str, Tensor]]
"""Returns the weights without adapter, at least those with these names of the HF state dict, in the
engine's data types. Called once; the tensors must not change. Raises WeightsReadError."""


def weights_of_model(model_path: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Load all weights of a model directory on the CPU, or raise WeightsReadError."""
    try:
        model = load_causal_lm(model_path, dtype)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise wire.WeightsReadError(f"cannot load the model {model_path}: {error}") from error
    state = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(state.items())}
    return {name: one.detach() for name, one in state.items() if first[id(one)] == name}


class Buffer(Protocol):
    """A private copy of one published version, as `WeightBuffer`."""

    def read(self, manifest: WeightManifest) -> None:
        """Replace the previous version. Raises WeightsReadError, WeightsSupersededError."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by name, valid until the next `read`. Raises WeightsReadError."""


class MergingBuffer:
    """Whole weights as published, or the matrices that an adapter changes, merged with the base.

    It takes one more copy of these matrices: merging one version into the previous one would add up
    roundings. The base is the weights that the engine started with. If they are not those of the
    trainer's `model.path`, the fingerprint of the first version differs. If `every`, the weights
    without adapter are given too, for engines that load all or nothing.
    """

    def __init__(self, whole: WeightBuffer, base: Base, *, every: bool = False) -> None:
        self._whole = whole
        self._adapter = WeightBuffer()
        self._make_base = base
        self._every = every
        self._base: Mapping[str, Tensor] | None = None
        self._merged: dict[str, Tensor] = {}
        self._is_merged = False

    def read(self, manifest: WeightManifest) -> None:
        """See `WeightBuffer.read`."""
        self._is_merged = False
        if manifest.lora is None:
            self._whole.read(manifest)
            return
        if manifest.lora.serve != "merged":
            raise wire.WeightsReadError("the adapter was published unmerged; it cannot be merged")
        self._adapter.read(manifest)
        pairs = pairs_of(self._adapter.tensors())
        if self._base is None:
            self._base = self._make_base(pairs.keys())
        unknown = sorted(pairs.keys() - self._base.keys())
        if unknown:
            raise wire.WeightsReadError(f"the model lacks weights of the adapter: {unknown[:3]}")
        for name, pair in pairs.items():
            base = self._base[name]
            if name not in self._merged:
                self._merged[name] = torch.empty_like(base, pin_memory=base.is_pinned())
            merge(base, pair, manifest.lora.scaling, self._merged[name])
        self._is_merged = True

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightBuffer.tensors`."""
        if not self._is_merged or self._base is None:
            yield from self._whole.tensors()
        elif self._every:
            for name, base in self._base.items():
                yield name, self._merged.get(name, base)
        else:
            yield from self._merged.items()


class StagedWeights:
    """An engine's copy of one published version, from `stage` to `install`. Thread-safe.

    It takes one more copy of the weights, in the engine's data types. Without it a version that is
    overwritten during an installation would leave a mixture of two versions, and generation would
    stop for the whole copy. `check` raises WeightsError to refuse the tensors.
    """

    def __init__(self, check: Callable[[NamedTensors], None], buffer: Buffer | None = None) -> None:
        self._check = check
        self._buffer: Buffer = buffer or WeightBuffer()
        self._version: int | None = None
        self._lock = threading.Lock()

    def stage(self, manifest: WeightManifest) -> None:
        """Copy a published version and check it. It replaces a version that was not installed.

        If it raises, nothing is staged: WeightsSupersededError for a version that was overwritten
        or removed, WeightsError for a file that cannot be read or that `check` refused.
        """
        with self._lock:
            self._version = None
            try:
                self._buffer.read(manifest)
                tensors = list(self._buffer.tensors())
            except wire.WeightsSupersededError as error:
                raise WeightsSupersededError(str(error)) from error
            except wire.WeightsReadError as error:
                raise WeightsError(str(error)) from error
            self._check(tensors)
            self._version = manifest.policy_version

    def clear(self) -> None:
        """Forget a version that was staged and not installed."""
        with self._lock:
            self._version = None

    @contextmanager
    def install(self, policy_version: int) -> Iterator[NamedTensors]:
        """Yield the staged tensors once, valid inside the block, or raise WeightsError."""
        with self._lock:
            if self._version != policy_version:
                raise not_staged(policy_version, self._version)
            self._version = None
            yield list(self._buffer.tensors())


def not_staged(policy_version: int, staged: int | None) -> WeightsError:
    """Return the error of an installation without its staging."""
    found = "no version is" if staged is None else f"version {staged} is"
    return WeightsError(
        f"weights of version {policy_version} cannot be installed: {found} staged; "
        "call stage_weights first"
    )
