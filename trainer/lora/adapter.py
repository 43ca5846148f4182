"""The adapter of a policy: peft's layers around the model's, and its PEFT directories.

```
x ─┬─► W (frozen) ─────────────────────► + ─► y
   └─► A ─► B ─► times alpha / rank ──────┘
```

The trainer computes both branches and publishes A and B. `fingerprint` is that of the merged
weights, which engines compute from them (`asyncrl.wire.weights.adapter`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.trainer.base.errors import UnsupportedModelError
from asyncrl.trainer.base.lora_config import LoraConfig
from asyncrl.trainer.lora.files import (
    PREFIX,
    TENSORS,
    adapter_settings,
    why_not_started_from,
    write_settings,
)
from asyncrl.wire.weights.adapter import layer_of, merged, names_of, pairs_of, served_apart
from asyncrl.wire.weights.fingerprint import TensorSums, collect, fingerprint, sums_of
from asyncrl.wire.weights.layout import Fingerprint, LoraSpec

_NAME = "default"
_BASE = ".base_layer."
"""Inserted by peft into the names of an adapted layer's own parameters."""
_LINEAR = {"Linear", "OnednnLinear"}


def read_adapter(directory: Path, config: LoraConfig) -> dict[str, Tensor]:
    """Read an adapter's tensors, by peft's names in a model. Raises UnsupportedModelError."""
    why = why_not_started_from(directory, config)
    if why is not None:
        raise UnsupportedModelError(f"trainer.lora.adapter: {why}")
    try:
        found = load_file(directory / TENSORS)
    except (OSError, SafetensorError) as error:
        raise UnsupportedModelError(
            f"trainer.lora.adapter: {directory / TENSORS} cannot be read: {error}"
        ) from error
    names = [n.removeprefix(PREFIX).removesuffix(".weight") + ".default.weight" for n in found]
    return dict(zip(names, found.values(), strict=True))


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> None:
    """Write a PEFT directory. Raises OSError, SafetensorError."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [PREFIX + name.replace(".default.weight", ".weight") for name in tensors]
    values = [one.detach().contiguous() for one in tensors.values()]
    contiguous = dict(zip(names, values, strict=True))
    save_file(contiguous, folder / TENSORS, metadata={"format": "pt"})
    write_settings(folder, settings)


class Adapter:
    """Adds adapters to a model's linear layers, in place. Attributes: `config`, `layers` by name.

    Raises UnsupportedModelError if the targets, or the adapter to start from, do not fit the model.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig, dtype: torch.dtype) -> None:
        self.config = config
        self._model = model
        _check_targets(model, config)
        _inject(model, config)
        self.layers: dict[str, Any] = {
            name: module
            for name, module in model.named_modules()
            if hasattr(module, "lora_A") and hasattr(module, "base_layer")
        }
        odd = {type(one.base_layer).__name__ for one in self.layers.values()} - _LINEAR
        if odd:
            raise UnsupportedModelError(
                f"trainer.lora: {type(model).__name__} has layers of kind "
                f"{', '.join(sorted(odd))}, but only linear layers can have an adapter; set "
                "trainer.lora.targets"
            )
        for parameter in self._parameters().values():
            parameter.data = parameter.data.to(dtype)
        self._initial: dict[str, Tensor] | None = None
        if config.adapter is not None:
            self._start_from(Path(config.adapter))
        self._constant: dict[tuple[int, torch.dtype | None], TensorSums] = {}

    @property
    def spec(self) -> LoraSpec:
        """Its description in a manifest."""
        return LoraSpec(self.config.rank, self.config.scaling, self.config.serve)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield A and B of each layer, as they are published; live tensors."""
        for name, parameter in self._parameters().items():
            yield name, parameter.detach()

    def settings(self, model_path: str) -> dict[str, Any]:
        """Contents of its PEFT adapter_config.json."""
        return adapter_settings(self.layers, self.config, model_path)

    def module(self) -> nn.Module:
        """A module of A and B alone, for checkpoints."""
        return _AdapterModule(self._parameters())

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's own weights by name of the HF state dict, tied ones by each name."""
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if layer_of(name) is None:
                yield name.replace(_BASE, "."), tensor

    def base_digest(self) -> str:
        """Digest of the model's own weights."""
        return fingerprint(self.base()).whole

    def own(self) -> Fingerprint:
        """Fingerprint of the model's own weights and the adapter's, unmerged."""
        return fingerprint([*self.base(), *self.tensors()])

    def fingerprint(self, dtype: torch.dtype) -> Fingerprint:
        """Fingerprint as engines of this type hold them: merged, or weights and adapter separate.

        One merged matrix exists at a time. Digests of weights without adapter are cached.
        """
        apart = self.config.serve == "adapter"
        pairs = {} if apart else pairs_of(self.tensors())
        named: list[tuple[str, TensorSums]] = []
        for name, tensor in self.base():
            if name in pairs:
                own = merged(tensor, pairs[name], self.config.scaling, dtype)
                named.append((name, sums_of(own)))
                continue
            key = id(tensor), dtype
            if key not in self._constant:
                self._constant[key] = sums_of(tensor, dtype)
            named.append((name, self._constant[key]))
        if apart:
            served = served_apart(self.tensors(), self.config.scaling, dtype)
            named += [(name, sums_of(one)) for name, one in served]
        return collect(named)

    @contextmanager
    def initial(self) -> Iterator[None]:
        """Compute as the initial policy inside the block, without gradients."""
        if self._initial is None:
            _switch(self.layers, off=True)
            try:
                yield
            finally:
                _switch(self.layers, off=False)
            return
        trained = {name: one.data for name, one in self._parameters().items()}
        self._set(self._initial)
        try:
            yield
        finally:
            self._set(trained)

    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        # Through `.data`, so that tensors kept for a backward pass do not count as changed.
        for name, parameter in self._parameters().items():
            parameter.data = tensors[name].to(parameter.device)

    def _parameters(self) -> dict[str, nn.Parameter]:
        found: dict[str, nn.Parameter] = {}
        for name, layer in self.layers.items():
            a, b = names_of(name)
            found[a], found[b] = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
        return found

    @torch.no_grad()
    def _start_from(self, directory: Path) -> None:
        own = self._parameters()
        given = read_adapter(directory, self.config)
        wrong = sorted(given.keys() ^ own.keys())
        wrong += [n for n in given.keys() & own.keys() if given[n].shape != own[n].shape]
        if wrong:
            raise UnsupportedModelError(
                f"trainer.lora.adapter: {directory} does not fit: {', '.join(wrong[:3])} differ; "
                "it must have trainer.lora.targets, and be of this model"
            )
        for name, parameter in own.items():
            parameter.copy_(given[name])
        self._initial = {name: one.detach().clone() for name, one in own.items()}


class _AdapterModule(nn.Module):
    """Parameters by names with dots, which `register_parameter` does not take."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._named = dict(parameters)

    def state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the parameters by name."""
        return dict(self._named)

    def named_parameters(self, *_args: Any, **_kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by name."""
        yield from self._named.items()


def _inject(model: PreTrainedModel, config: LoraConfig) -> None:
    try:
        import peft
    except ImportError as error:
        raise UnsupportedModelError(
            "trainer.lora needs peft, which is not installed: pip install 'asyncrl[lora]'"
        ) from error
    targets = _targets(model, config)
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, bias="none"
    )
    try:
        peft.inject_adapter_in_model(settings, model)
    except ValueError as error:
        raise UnsupportedModelError(
            f"trainer.lora.targets: {config.targets} cannot be adapted in "
            f"{type(model).__name__}: {error}"
        ) from error


def _targets(model: PreTrainedModel, config: LoraConfig) -> str | list[str]:
    """Name the layers that peft adapts.

    All linear layers by name: peft's `all-linear` also means the experts of a mixture, which are
    parameters and not layers. If there are none (GPT-2), what peft finds is refused by kind.
    """
    if not isinstance(config.targets, str):
        return list(config.targets)
    return _linear_layers(model) or config.targets


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of linear layers that may have an adapter: all but the head and the embeddings."""
    outer = (model.get_output_embeddings(), model.get_input_embeddings())
    modules = model.named_modules()
    return [name for name, one in modules if isinstance(one, nn.Linear) and one not in outer]


def _check_targets(model: PreTrainedModel, config: LoraConfig) -> None:
    if isinstance(config.targets, str):
        return
    modules, linear = dict(model.named_modules()), _linear_layers(model)
    for target in config.targets:
        meant = [n for n in modules if n == target or n.endswith(f".{target}")]
        for name in meant:
            if name not in linear:
                raise UnsupportedModelError(
                    f"trainer.lora.targets: {name} is not a linear layer of a block "
                    f"({type(modules[name]).__name__}), but only those can have an adapter"
                )
        if not meant:
            inner = {name.rpartition(".")[2] for name in linear}
            raise UnsupportedModelError(
                f"trainer.lora.targets: {target} is not a layer of {type(model).__name__}; its "
                f"linear layers are {', '.join(sorted(inner))}"
            )


def _switch(layers: Mapping[str, Any], *, off: bool) -> None:
    """Disable or enable adapters; peft's `enable_adapters` also changes what has gradients."""
    for layer in layers.values():
        layer._disable_adapters = off  # noqa: SLF001
