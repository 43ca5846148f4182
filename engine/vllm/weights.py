"""New weights on their way to vLLM's process: checked, then through memory that both map.

The memory is an anonymous file (memfd): no other user can open it, it needs no room in /dev/shm,
and it is gone with this process however that ends. It is written again for each version, in the
layout of `wire.weights.layout`. Only the manifest, plain strings and numbers, goes over a
socket; the other process opens the file as /proc/PID/fd/N.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from engine.errors import EngineError, EngineStartError, WeightsError
from wire.weights.layout import HEADER_BYTES, TensorSpec, WeightManifest

_ALIGNMENT = 64
_SHOWN = 5


class ModelShapes:
    """Names and shapes of a model's HF state dict, ties included."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], needed: frozenset[str]) -> None:
        self.shapes = shapes
        self.needed = needed
        """One name of each tensor; of tied ones the first."""

    @classmethod
    def of(cls, model_path: str) -> ModelShapes:
        """Read from a model directory's configuration; no weights are loaded.

        Raises:
            EngineStartError: there is no such model, or transformers cannot build it.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(model_path)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except (OSError, ValueError, KeyError) as error:
            raise EngineStartError(f"model {model_path!r}: {error}") from error
        state = model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(state.items())}
        parameters = {id(p) for p in model.parameters()}
        return cls(
            {name: tuple(tensor.shape) for name, tensor in state.items()},
            frozenset(name for key, name in first.items() if key in parameters),
        )

    def check(self, given: dict[str, tuple[int, ...]]) -> None:
        """Raise WeightsError unless `given` names every tensor, in its shape, and nothing else."""
        _refuse("unexpected weights (not in the model)", [n for n in given if n not in self.shapes])
        _refuse(
            "weights of a wrong shape",
            [
                f"{n}: {shape} given, {self.shapes[n]} needed"
                for n, shape in given.items()
                if shape != self.shapes[n]
            ],
        )
        _refuse("missing weights", sorted(self.needed - given.keys()))


def _refuse(what: str, wrong: list[str]) -> None:
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise WeightsError(f"{what}: {', '.join(wrong[:_SHOWN])}{more}; the weights stay as before")


class WeightsFile:
    """The writer's side: one file, one version at a time."""

    def __init__(self) -> None:
        self._fd: int | None = None

    def write(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        policy_version: int,
        shapes: ModelShapes,
    ) -> WeightManifest:
        """Check all tensors, then copy them into the file.

        Raises:
            WeightsError: names, shapes or values do not fit; vLLM was told nothing.
            EngineError: there is not enough memory.
        """
        tensors = _unique(weights)
        shapes.check({name: tuple(t.shape) for name, t in tensors.items()})
        specs, end = _layout(tensors)
        with self._mapped(end) as memory:
            header = torch.frombuffer(memory, dtype=torch.int64, count=1)
            header.fill_(-1)
            for spec in specs:
                view = _view(memory, spec)
                view.copy_(tensors[spec.name].detach())
                if not torch.isfinite(view).all():
                    raise WeightsError(
                        f"weight {spec.name!r} has values that are not finite; "
                        "the weights stay as before"
                    )
                del view
            header.fill_(policy_version)
            del header
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return WeightManifest(policy_version, path, end, tuple(specs))

    @contextlib.contextmanager
    def _mapped(self, size: int) -> Iterator[mmap.mmap]:
        try:
            if self._fd is None:
                self._fd = os.memfd_create("asyncrl-weights")
            os.posix_fallocate(self._fd, 0, size)
            memory = mmap.mmap(self._fd, size)
        except OSError as error:
            raise EngineError(
                f"{size} bytes of memory are needed to hand new weights to vLLM: {error.strerror}"
            ) from error
        try:
            yield memory
        finally:
            # A tensor over it may still be alive in a traceback; the file itself is kept anyway.
            with contextlib.suppress(BufferError):
                memory.close()

    def close(self) -> None:
        """Free the memory. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_tensors(manifest: WeightManifest) -> Iterator[tuple[str, torch.Tensor]]:
    """The reader's side: tensors over the mapped file, valid until the next one is asked for."""
    with Path(manifest.path).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        version = int.from_bytes(memory[:8], "little", signed=True)
        if version != manifest.policy_version:
            raise ValueError(f"{manifest.path} holds {version}, not {manifest.policy_version}")
        for spec in manifest.tensors:
            # A copy: vLLM may keep a tensor until the rest of its layer has come.
            yield spec.name, _view(memory, spec).clone()


def _unique(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if name in tensors:
            raise WeightsError(f"weight {name!r} was given twice; the weights stay as before")
        tensors[name] = tensor
    return tensors


def _layout(tensors: dict[str, torch.Tensor]) -> tuple[list[TensorSpec], int]:
    specs, end = [], HEADER_BYTES
    for name, tensor in tensors.items():
        offset = math.ceil(end / _ALIGNMENT) * _ALIGNMENT
        nbytes = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(TensorSpec(name, dtype, tuple(tensor.shape), offset, nbytes))
        end = offset + nbytes
    return specs, end


def _view(memory: mmap.mmap, spec: TensorSpec) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    count = math.prod(spec.shape)
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=spec.offset)
    return flat.view(spec.shape)
