"""A second tree of a model's modules: new weights are loaded into it while the first one decodes.

Loaders stack, pad, shard and pack a checkpoint's tensors, and they write into modules. So they get
shallow copies of the modules, with separate parameters and buffers.

    twin = ShadowModel(model, device)
    load(twin.model, tensors)      # in a thread; the model keeps decoding
    twin.install()                 # between two steps: copies parameter by parameter

On a CPU vLLM multiplies by packed copies, which a function of each layer holds (`cpu_linear`).
Loading makes new ones, and installing swaps the two functions. SGLang packs nothing.

This equals loading into the model only if loading leaves nothing besides parameters and that
function. `Attributes` and `differences` find out; `asyncrl.engine.remote.worker.staging` calls them
once, before anything is served.
"""

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.wire.weights.fingerprint import sums_of
from asyncrl.wire.weights.layout import laid_out
from asyncrl.wire.weights.memory import Pin, tensor_view

PACKED = "cpu_linear"
"""Attribute of the layers that vLLM packs on a CPU: the product with the packed weight."""
_TREE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_OF_LOADING = ("_do_torchao_reload", "_original_do_torchao_reload")
"""Attributes that only vLLM's loading uses."""
_WRAPPER = "online_process_loader"
"""Name of the function that vLLM wraps around a tensor's loader while it loads."""
_NOT_LOOKED_AT = (PACKED, *_OF_LOADING, "_parameters", "_modules", "kv_cache")
"""Attributes that `Attributes` leaves out: compared by the twin, or never made of weights."""
_DEPTH = 3
"""Depth to which `Attributes` follows containers and objects of engines from a module."""
_ENGINES = ("vllm", "sglang")
_ROWS = 4
"""Random rows that both packed copies of a weight are multiplied by."""


class ShadowModel:
    """A model's second tree, which can be installed into the model.

    Its parameters lie in one piece on `device`, page-locked in host memory if the model is on a
    GPU. `untouched` are keys of `loaded_parts` that no loading changes, such as rows of a
    vocabulary of which a rank has only padding. Raises ValueError if a parameter is not contiguous
    in memory.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, untouched: Collection[str] = ()
    ) -> None:
        self._untouched = frozenset(untouched)
        live = list(model.modules())
        twins = {id(one): _shallow(one) for one in live}
        on_gpu = any(one.device.type == "cuda" for one in model.parameters())
        memory, views = _memory_for(model, device)
        self._tensors = {id(one): (one, view) for one, view in views}
        for own, copy in self._tensors.values():
            copy.copy_(own.detach())
        self._loaded = [
            self._tensors[id(one)][1]
            for name, one in model.named_parameters()
            if name not in self._untouched
        ]
        self.pairs: list[tuple[Any, Any]] = [(one, twins[id(one)]) for one in live]
        """Each module of the model, and its twin."""
        self.model = twins[id(model)]
        made: dict[int, Any] = {}
        for module, twin in self.pairs:
            held, own = vars(module), vars(twin)
            own |= {name: _bound(value, twins) for name, value in own.items()}
            own["_modules"] |= {
                name: twins[id(child)]
                for name, child in held["_modules"].items()
                if child is not None
            }
            for name, tensor in held["_parameters"].items():
                if tensor is not None:  # a tied one is one tensor of several modules, here too
                    if id(tensor) not in made:
                        made[id(tensor)] = like(tensor, self._tensors[id(tensor)][1], module, twin)
                    own["_parameters"][name] = made[id(tensor)]
            for name, tensor in held["_buffers"].items():
                if tensor is not None:
                    own["_buffers"][name] = like(tensor, tensor.detach().clone(), module, twin)
        # Last, so that nothing stays locked if a part cannot be copied.
        self._pin = Pin(memory) if on_gpu and device.type == "cpu" else None

    def poison(self) -> None:
        """Set all numbers that loading sets to NaN, so that numbers it leaves alone differ."""
        for staged in self._loaded:
            if staged.is_floating_point():
                staged.fill_(float("nan"))

    def close(self) -> None:
        """Unlock the twin's memory. It may not be used any more."""
        if self._pin is not None:
            self._pin.release()

    def install(self) -> None:
        """Copy what was loaded into the model; called while no step runs, in inference mode."""
        device = None
        for own, staged in self._tensors.values():
            own.data.copy_(staged, non_blocking=True)
            device = own.device
        for module, twin in self._packed():
            ours, theirs = getattr(twin, PACKED), getattr(module, PACKED)
            setattr(module, PACKED, ours)
            setattr(twin, PACKED, theirs)
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)  # the twin may be loaded again from here on

    def differences(self, wanted: dict[str, Any]) -> list[str]:
        """Return the names of what differs from the model's earlier `loaded_parts`, `wanted`.

        Buffers are compared with the model's current ones. No step may run.
        """
        names = {id(module): name for name, module in self.pairs[0][0].named_modules()}
        found: list[str] = []
        for module, twin in self.pairs:
            path = names[id(module)]
            for kind in ("_parameters", "_buffers"):
                held, staged = vars(module)[kind], vars(twin)[kind]
                if held.keys() != staged.keys():
                    found.append(f"the {kind[1:]} of {path!r} have other names")
                    continue
                found += [
                    f"{path}.{name}"
                    for name, tensor in held.items()
                    if tensor is not None
                    and not self._holds(tensor, staged[name], wanted.get(_part(path, name)))
                ]
        for module, twin in self._packed():
            part = _part(names[id(module)], PACKED)
            before = wanted[part]
            is_kept = before.function is getattr(twin, PACKED)
            if is_kept and part in self._untouched:
                continue
            if not _is_packed_anew(twin, before):
                found.append(f"the packed weight of {names[id(module)]!r}")
        return found

    def _holds(self, live: Tensor, staged: Tensor, wanted: Any) -> bool:
        """Return True if a tensor of the twin has the wanted numbers, where installing reads."""
        if not isinstance(live, nn.Parameter):
            return _same_bits(live, staged)
        if _note_of(staged.detach().to(live.device)) != wanted:
            return False
        memory = self._tensors.get(id(live))
        is_ours = memory is not None and memory[1].data_ptr() == staged.data_ptr()
        return is_ours or not live.numel()

    def _packed(self) -> Iterator[tuple[Any, Any]]:
        return ((module, twin) for module, twin in self.pairs if PACKED in vars(module))


def loaded_parts(model: nn.Module) -> dict[str, Any]:
    """Return digests of each parameter and packed weight of a model, tied ones by every name."""
    parts: dict[str, Any] = {}
    notes: dict[int, _Note] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        parts[name] = notes[id(one)] = notes.get(id(one)) or _note_of(one)
    for path, module in model.named_modules():
        if PACKED in vars(module):
            function = vars(module)[PACKED]
            product = _product(module, function, module.weight)
            parts[_part(path, PACKED)] = _Packed(function, product)
    return parts


def unchanged(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return the keys of `loaded_parts` with the same numbers, or the same function."""
    return {name for name in before if name in after and _is_same(after[name], before[name])}


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the keys of `loaded_parts` with other numbers, or another product."""
    same = unchanged(before, after)
    return [
        name
        for name, one in before.items()
        if name not in same and not (isinstance(one, _Packed) and one.gives_as(after.get(name)))
    ]


def _part(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


class Attributes:
    """Digests of a model besides parameters and packed weights, to see what a loading changes.

    Buffers, other tensors and plain values, in modules, in containers and in objects of the engine
    that belong to modules. A change in place is seen. No step may run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held = _noted(model)

    def changed(self) -> list[str]:
        """Return the names of what has changed, is new or is gone."""
        now = _noted(self._model)
        same = unchanged(self._held, now)
        return [name for name in now | self._held if name not in same]


@dataclass(frozen=True, slots=True)
class _Note:
    """Stands for a tensor (with a digest), or for a container."""

    kind: str
    shape: tuple[int, ...]
    digest: str = ""


@dataclass(frozen=True, slots=True)
class _Packed:
    function: Any
    product: Tensor | None
    """Its result for random rows; None: their width is unknown."""

    def gives_as(self, other: Any) -> bool:
        """Return True if another one gives the same bits."""
        given = other.product if isinstance(other, _Packed) else None
        return self.product is not None and given is not None and _same_bits(self.product, given)


_PLAIN = (bool, int, float, str, bytes, frozenset, type(None), _Note)


def _noted(model: nn.Module) -> dict[str, Any]:
    seen: set[int] = set()
    return {
        name: value
        for path, module in model.named_modules()
        for own, part in vars(module).items()
        if own not in _NOT_LOOKED_AT
        for name, value in _reached(f"{path}.{own}", part, _DEPTH, seen)
    }


def _reached(path: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield path, _note_of(value)
    elif isinstance(value, (dict, list, tuple)) and depth:
        yield path, _Note(type(value).__name__, (len(value),))
    else:
        yield path, value
    parts = _parts(value) if depth and id(value) not in seen else {}
    if parts:
        seen.add(id(value))
        for name, part in parts.items():
            if name not in _NOT_LOOKED_AT:
                yield from _reached(f"{path}.{name}", part, depth - 1, seen)


def _parts(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {str(key): part for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return {str(index): part for index, part in enumerate(value)}
    is_of_engine = type(value).__module__.startswith(_ENGINES) and not isinstance(value, nn.Module)
    return dict(getattr(value, "__dict__", {})) if is_of_engine else {}


def _note_of(tensor: Tensor) -> _Note:
    kind = f"{tensor.dtype} on {tensor.device}"
    if tensor.device.type == "meta" or not tensor.numel():
        return _Note(kind, tuple(tensor.shape))
    if tensor.device.type == "cpu":  # sums of int64 take ten times as long here
        numbers = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        return _Note(kind, tuple(tensor.shape), hashlib.blake2b(numbers.data).hexdigest())
    sums = sums_of(tensor).whole
    return _Note(kind, tuple(tensor.shape), "" if sums is None else str(sums.tolist()))


def like(tensor: Tensor, data: Tensor, live: nn.Module, twin: nn.Module) -> Tensor:
    """Return `data` with the class and attributes of a module's tensor, for the module's twin."""
    data.__class__ = tensor.__class__
    for name, value in vars(tensor).items():
        while getattr(value, "__name__", "") == _WRAPPER:
            value = value.__wrapped__
        data.__dict__[name] = _bound(value, {id(live): twin})
    return data


def _shallow(module: nn.Module) -> Any:
    """Copy a module's attributes to a new one, without tensors or children."""
    twin = object.__new__(type(module))
    twin.__dict__.update(vars(module))
    for name in _TREE:
        twin.__dict__[name] = vars(module)[name].copy()
    return twin


def _bound(value: Any, twins: dict[int, Any]) -> Any:
    if isinstance(value, MethodType) and id(value.__self__) in twins:
        return MethodType(value.__func__, twins[id(value.__self__)])
    return value


def _memory_for(
    model: nn.Module, device: torch.device
) -> tuple[Tensor, list[tuple[nn.Parameter, Tensor]]]:
    """Allocate memory of the model's size; return it with each parameter's view of it."""
    parameters = list(model.named_parameters())
    loose = [name for name, one in parameters if not one.is_contiguous()]
    if loose:
        raise ValueError(f"these parameters are not contiguous in memory: {', '.join(loose)}")
    specs, nbytes = laid_out(
        (name, str(one.dtype).removeprefix("torch."), one.dtype.itemsize, tuple(one.shape))
        for name, one in parameters
    )
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    views = [
        (one, tensor_view(memory, spec)) for (_, one), spec in zip(parameters, specs, strict=True)
    ]
    return memory, views


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, _Packed) and isinstance(other, _Packed):
        return _is_same(one.function, other.function)
    if isinstance(one, MethodType) and isinstance(other, MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    return type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    other = other.detach().to(one.device)
    return torch.equal(*(x.detach().contiguous().view(-1).view(torch.uint8) for x in (one, other)))


def _product(module: Any, function: Any, weight: Tensor) -> Tensor | None:
    """Return a layer's product for fixed random rows; None if their width is unknown."""
    width = getattr(module, "input_size_per_partition", None) or getattr(
        module, "embedding_dim", None
    )
    if width is None:
        return None
    dtype = getattr(module, "params_dtype", None) or module.weight.dtype
    rows = torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    found: Tensor = function(rows, weight, None)
    return found


def _is_packed_anew(twin: Any, before: _Packed) -> bool:
    """Return True if a twin's product gives what the model's gave, and reads no other memory.

    A product may read only the weight that it is called with, or a copy: products are swapped.
    """
    function, given = getattr(twin, PACKED), twin.weight.detach().clone()
    found = _product(twin, function, given)
    if found is None or before.product is None:
        return False
    if function is before.function:
        poisoned = _product(twin, function, given * float("nan"))
        if poisoned is None or not poisoned.isnan().all():
            return False  # loading has not packed anew
    twin.weight.data.fill_(float("nan"))
    alone = _product(twin, function, given)
    twin.weight.data.copy_(given)
    return alone is not None and _same_bits(before.product, found) and _same_bits(found, alone)
