"""Everything that training changes, as named tensors: the state in a checkpoint.

```
weights/MODULE/NAME                 parameters and persistent buffers; a tied weight once
optimizer/OPTIMIZER/MODULE/NAME/KEY optimizer's state of a parameter, as `exp_avg`
random/RANK/cpu, random/RANK/cuda.0 random states of each rank
```

A rank holds a box of a sharded parameter and its moments. Names do not depend on the number of
ranks, so 2 ranks can load what 8 saved. An optimizer's settings, as its rate, are not part of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from asyncrl.trainer.base.errors import CheckpointError
from asyncrl.trainer.checkpoint.format.index import Index, SavedTensor
from asyncrl.trainer.checkpoint.format.tensors import Box
from asyncrl.trainer.optimizer.coded_moments import SCALE

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Inserted by torch into the names of a wrapped module's parameters."""
_PLAIN = (bool, int, float, str, type(None))


class Sharding(Protocol):
    """Maps a module's parameters to what this rank's optimizers hold."""

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the optimizer's part of a module's parameter, or the parameter itself."""

    def box(self, parameter: nn.Parameter, local: Tensor) -> Box:
        """Place a tensor like `own(parameter)` in one that is like the parameter."""


class Shardings:
    """Combines the shardings of several optimizers of different parameters.

    Other parameters, which may be DTensors, are held by the optimizers themselves.
    """

    def __init__(self, each: Sequence[Sharding] = ()) -> None:
        self._each = each

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """See `Sharding`."""
        found = self._of(parameter)
        return parameter if found is None else found.own(parameter)

    def box(self, parameter: nn.Parameter, local: Tensor) -> Box:
        """See `Sharding`."""
        found = self._of(parameter)
        return Box.of(local) if found is None else found.box(parameter, local)

    def _of(self, parameter: nn.Parameter) -> Sharding | None:
        return next((one for one in self._each if one.own(parameter) is not parameter), None)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Modules, their optimizers and other trained state, by name: critics, adapters, references."""

    modules: Mapping[str, nn.Module]
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    """Everything that is not a tensor, as JSON types."""
    sharding: Sharding = field(default_factory=Shardings)

    def boxes(self, rank: int) -> dict[str, Box]:
        """This rank's part, as live tensors; random states are current."""
        named: dict[str, Box] = {}
        for name, tensor in self._weights():
            named[name] = Box.of(tensor)
            if isinstance(tensor, nn.Parameter):
                own = self.sharding.own(tensor)
                if own is not tensor:
                    named[name] = self.sharding.box(tensor, own.detach())
        for optimizer, name, parameter, state in self._states():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    box = self._box(parameter, value, key)
                    named[f"optimizer/{optimizer}/{name}/{key}"] = box
        return named | {name: Box.of(one) for name, one in random_states(rank).items()}

    def plain(self) -> dict[str, Any]:
        """Everything that is not a tensor, as JSON types. Raises TypeError for anything else."""
        states: dict[str, dict[str, dict[str, Any]]] = {}
        for optimizer, name, _, state in self._states():
            for key, value in state.items():
                if not isinstance(value, (Tensor, *_PLAIN)):
                    raise TypeError(
                        f"optimizer/{optimizer}/{name}/{key} is a {type(value).__name__}, which a "
                        "checkpoint cannot hold"
                    )
            of = states.setdefault(optimizer, {})
            of[name] = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
        return {"values": dict(self.values), "states": states}

    def targets(self, index: Index, rank: int) -> tuple[dict[str, Box], "Restored"]:
        """Return targets for loading: tensors that are changed in place, and the rest.

        The rest takes effect with `Restored.apply` once all tensors are loaded; it lacks random
        states if fewer ranks saved them. Raises
        CheckpointError if the saved state is of another model; KeyError, TypeError or
        AttributeError if the index is not as written.
        """
        named = {name: Box.of(tensor) for name, tensor in self._weights()}
        rest = Restored(index.values["values"], list(self.optimizers.values()))
        parameters = self._parameters()
        for optimizer, states in index.values["states"].items():
            of = self.optimizers.get(optimizer)
            for name, plain in states.items():
                if of is None or name not in parameters:
                    raise CheckpointError(f"it is of another model: {optimizer}/{name} is unknown")
                prefix = f"optimizer/{optimizer}/{name}/"
                state: dict[str, Any] = dict(plain)
                own = self.sharding.own(parameters[name])
                for full, saved in index.tensors.items():
                    if not full.startswith(prefix):
                        continue
                    key = full.removeprefix(prefix)
                    like = key != "step" and saved.shape == tuple(parameters[name].shape)
                    state[key] = empty = _empty(own, saved, of, key, like=like)
                    named[full] = self._box(parameters[name], empty, key)
                rest.states.append((of, own, state))
        saved_names = {one for one in index.tensors if not one.startswith("random/")}
        wrong = sorted(saved_names ^ named.keys())
        if wrong:
            raise CheckpointError(f"it is of another model: {wrong[:3]} are not in both")
        for name, saved in index.tensors.items():
            if name.startswith(f"random/{rank}/"):
                empty = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
                rest.random[name.rpartition("/")[2]], named[name] = empty, Box.of(empty)
        return named, rest

    def _box(self, parameter: nn.Parameter, value: Tensor, key: str) -> Box:
        """Box an optimizer's tensor: sharded like the parameter if it has its shape, or its rows.

        Moments in 8 bits have scales (`trainer.optimizer.coded_moments`), some for each row.
        """
        own = self.sharding.own(parameter)
        if own is not parameter and (value.shape == own.shape or key.endswith(SCALE)):
            return self.sharding.box(parameter, value)
        return Box.of(value)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for module, one in self.modules.items():
            seen: set[int] = set()
            for name, tensor in one.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor) and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"weights/{module}/{unwrapped(name)}", tensor

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {
            f"{module}/{unwrapped(name)}": parameter
            for module, one in self.modules.items()
            for name, parameter in one.named_parameters()
        }

    def _states(self) -> Iterator[tuple[str, str, nn.Parameter, dict[str, Any]]]:
        """Yield optimizer, parameter by name, and its state, where there is one."""
        known = {
            id(self.sharding.own(parameter)): (name, parameter)
            for name, parameter in self._parameters().items()
        }
        for optimizer, one in self.optimizers.items():
            for own, state in one.state.items():
                yield optimizer, *known[id(own)], state


@dataclass(slots=True)
class Restored:
    """The part of a saved state that is not loaded in place."""

    values: dict[str, Any]
    optimizers: list[Optimizer] = field(default_factory=list)
    states: list[tuple[Optimizer, nn.Parameter, dict[str, Any]]] = field(default_factory=list)
    random: dict[str, Tensor] = field(default_factory=dict)

    def apply(self) -> None:
        """Set the states of optimizers, and of the random generators that exist here."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        for optimizer, parameter, state in self.states:
            optimizer.state[parameter] = state
        for generator, tensor in self.random.items():
            if generator == "cpu":
                torch.set_rng_state(tensor)
            elif (device := int(generator.removeprefix("cuda."))) < torch.cuda.device_count():
                torch.cuda.set_rng_state(tensor, device)


def random_states(rank: int) -> dict[str, Tensor]:
    """States of this process's random generators, by name."""
    states = {f"random/{rank}/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"random/{rank}/cuda.{index}"] = state
    return states


def unwrapped(name: str) -> str:
    """Remove what wrappers add from a parameter's name.

    >>> unwrapped("model.layers.0._orig_mod.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _empty(
    own: nn.Parameter, saved: SavedTensor, optimizer: Optimizer, key: str, *, like: bool
) -> Tensor:
    """Empty tensor of an optimizer's state, `like` this rank's part of the parameter or small."""
    dtype = getattr(torch, saved.dtype)
    is_scale = key.endswith(SCALE)
    shape = (len(own), *saved.shape[1:]) if is_scale else own.shape
    if (like or is_scale) and getattr(optimizer, "on_host", False):
        return torch.zeros(shape, dtype=dtype, pin_memory=own.is_cuda)
    if is_scale:
        return torch.zeros(shape, dtype=dtype, device=own.device)
    if like:
        with torch.no_grad():
            return torch.zeros_like(own, dtype=dtype, requires_grad=False)
    device = own.to_local().device if isinstance(own, DTensor) else own.device
    on_device = any(one.get("fused") or one.get("capturable") for one in optimizer.param_groups)
    return torch.zeros(saved.shape, dtype=dtype, device=device if on_device else "cpu")
