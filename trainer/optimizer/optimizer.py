"""AdamW, its learning rate schedule, gradient clipping, and the step of one rank.

Its moments may take less memory on the device: in bfloat16 or 8 bits, on the host, or both. The
arithmetic is AdamW's (arXiv 1711.05101, algorithm 2) in the parameter's type; only what is kept
between steps differs. A moment's change in a step is mostly less than the last of bfloat16's 8
bits, and rounding to the nearest would lose it; stochastic rounding keeps the expected value exact.
The same holds in 8 bits (`asyncrl.trainer.optimizer.coded_moments`).

Slices of a parameter are brought to the device one by one, so only one has float32 moments.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.base.errors import NonFiniteError, TrainerError
from asyncrl.trainer.checkpoint.format.tensors import Box
from asyncrl.trainer.optimizer import coded_moments
from asyncrl.trainer.optimizer.coded_moments import CODES, SCALE
from asyncrl.trainer.optimizer.training_state import Sharding, Shardings
from asyncrl.trainer.ranks.shards import Shards
from asyncrl.trainer.ranks.world import World
from asyncrl.trainer.sharding.weights import LocalRows, local

SLICE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Numbers of a parameter that are updated at a time, by device."""
_CODED_SHARE = 8
"""Divisor of a slice for coded moments: coding needs this many numbers for each."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_KEPT_AS = {"float32": None, "bfloat16": torch.bfloat16, "int8": torch.uint8}


class SmallAdamW(torch.optim.Optimizer):
    """AdamW; states have torch's names, so that each can read the other's.

    Attribute: `on_host`, which keeps moments in the host's memory. `moments` is their data type, by
    default the parameter's; uint8 codes those of matrices only.
    """

    def __init__(
        self,
        groups: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        moments: torch.dtype | None = None,
        on_host: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(groups, defaults)
        self._moments, self.on_host = moments, on_host

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        if self.on_host and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # copies to the host have ended

    def load_state_dict(self, state_dict: Any) -> None:
        """Load torch's format, but keep moments in their own type and place."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            for name in state.keys() - {"step"}:
                state[name] = self._kept(state[name], parameter, is_scale=name.endswith(SCALE))

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state |= self._empty(local(parameter))
        state["step"] += 1
        whole, grads = local(parameter), local(parameter.grad)  # type: ignore[arg-type]
        if not whole.numel():
            return
        update = _Step(group, int(state["step"]))
        size = SLICE.get(whole.device.type, SLICE["cuda"])
        if self._is_coded(whole):
            self._update_coded(state, whole.flatten(1), grads.flatten(1), update, size)
            return
        weights, flat = whole.view(-1), grads.reshape(-1)
        for start in range(0, len(weights), size):
            part = slice(start, min(len(weights), start + size))
            mean, square = (
                state[name].view(-1)[part].to(whole.device, whole.dtype, non_blocking=True)
                for name in _MOMENTS
            )
            update.take(weights[part], flat[part], mean, square)
            for name, value in zip(_MOMENTS, (mean, square), strict=True):
                place = state[name].view(-1)[part]
                if place.data_ptr() != value.data_ptr():
                    kept = round_by_chance(value) if self._moments == torch.bfloat16 else value
                    place.copy_(kept, non_blocking=True)

    def _update_coded(
        self, state: dict[str, Any], weights: Tensor, grads: Tensor, update: "_Step", size: int
    ) -> None:
        for part in coded_moments.parts(weights, size // _CODED_SHARE):
            kept = [(state[name].flatten(1)[part], state[name + SCALE][part]) for name in _MOMENTS]
            moments = [
                CODES[name].decode(*(one.to(weights.device, non_blocking=True) for one in coded))
                for name, coded in zip(_MOMENTS, kept, strict=True)
            ]
            update.take(weights[part], grads[part], *moments)
            for name, coded, value in zip(_MOMENTS, kept, moments, strict=True):
                for place, new in zip(coded, CODES[name].encode(value), strict=True):
                    place.copy_(new, non_blocking=True)

    def _empty(self, whole: Tensor) -> dict[str, Tensor]:
        if self._is_coded(whole):
            made = coded_moments.empty(whole)
        else:
            kind = self._moments if self._moments == torch.bfloat16 else whole.dtype
            made = {name: torch.zeros_like(whole, dtype=kind) for name in _MOMENTS}
        return {name: self._placed(one, whole) for name, one in made.items()}

    def _is_coded(self, whole: Tensor) -> bool:
        return self._moments == torch.uint8 and whole.ndim >= 2  # vectors are small

    def _placed(self, moment: Tensor, parameter: Tensor) -> Tensor:
        if not self.on_host:
            return moment.to(parameter.device)
        on_host = moment.to("cpu")
        return on_host.pin_memory() if parameter.is_cuda else on_host

    def _kept(self, moment: Tensor, parameter: Tensor, *, is_scale: bool) -> Tensor:
        kind = self._moments
        if is_scale or (kind == torch.uint8 and parameter.ndim < 2):
            kind = None
        return self._placed(moment.to(kind or parameter.dtype), parameter)


class _Step:
    """AdamW's changes in a step, from 1."""

    def __init__(self, group: dict[str, Any], steps: int) -> None:
        first, second = group["betas"]
        self.group, self.step_size = group, group["lr"] / (1 - first**steps)
        self.root = math.sqrt(1 - second**steps)
        """Corrects the second moment's bias."""

    def take(self, weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> None:
        """Change weights and moments in place."""
        group, (first, second) = self.group, self.group["betas"]
        mean.lerp_(grad, 1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        divisor = (square.sqrt() / self.root).add_(group["eps"])
        weight.addcdiv_(mean, divisor, value=-self.step_size)


def round_by_chance(value: Tensor) -> Tensor:
    """Round to bfloat16, up or down at random such that the expected value is exact."""
    bits = value.float().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    return (bits + noise).bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)


def learning_rate(
    config: TrainerConfig,
    step: int,
    total_steps: int | None,
    peaks: Mapping[int, float] = MappingProxyType({}),
) -> float:
    """Learning rate of the run's step `step` (from 0): linear warm-up, then the schedule.

    `peaks` overrides the configured peak, by the first step with each value. The shape stays.
    Raises TrainerError if cosine or linear has no last step, or one inside the warm-up.
    """
    past = [one for one in peaks if one <= step]
    peak = peaks[max(past)] if past else config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / (config.warmup_steps + 1)
    if config.learning_rate_schedule == "constant":
        return peak
    end = config.schedule_steps or total_steps
    if end is None or end <= config.warmup_steps:
        raise TrainerError(
            f"trainer.learning_rate_schedule {config.learning_rate_schedule!r} needs a last step "
            f"after the warm-up of {config.warmup_steps}, got {end}: set trainer.schedule_steps"
        )
    progress = min(1.0, (step - config.warmup_steps) / (end - config.warmup_steps))
    share = 1 - progress
    if config.learning_rate_schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * progress))
    span = peak - config.learning_rate_minimum
    return config.learning_rate_minimum + span * share


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Return True for matrices: not for norms and biases, also those of experts, `[E, n]`.

    >>> is_decayed("experts.down_proj", torch.zeros(2, 3, 3))
    True
    >>> is_decayed("experts.down_proj_bias", torch.zeros(2, 3))
    False
    """
    return parameter.ndim >= 2 and not name.endswith("bias")


def make_adamw(
    parameters: Sequence[Tensor], config: TrainerConfig, decayed: Sequence[bool]
) -> torch.optim.Optimizer:
    """Create AdamW; weight decay applies to the `decayed` parameters (`is_decayed`).

    It is torch's fused one, on the CPU too, unless moments are in fewer bits or on the host.
    """
    kinds = list(zip(parameters, decayed, strict=True))
    groups = [
        {"params": [p for p, decays in kinds if decays], "weight_decay": config.weight_decay},
        {"params": [p for p, decays in kinds if not decays], "weight_decay": 0.0},
    ]
    present = [group for group in groups if group["params"]]
    same: Any = {"lr": config.learning_rate, "betas": config.betas, "eps": config.adam_epsilon}
    if config.optimizer_state != "float32" or config.optimizer_offload:
        kind, on_host = _KEPT_AS[config.optimizer_state], config.optimizer_offload
        return SmallAdamW(present, **same, moments=kind, on_host=on_host)
    return torch.optim.AdamW(present, **same, fused=True)


def scale_and_clip(
    parameters: Iterable[Tensor],
    denominator: float,
    max_norm: float,
    norm_of_all: Callable[[float], float] = float,
) -> float:
    """Divide summed gradients by the denominator and clip their global norm.

    Returns the norm before clipping, computed from the sums, so that both factors are applied in
    one pass. `norm_of_all` turns it into the norm over all ranks, if others have other parameters.
    Raises NonFiniteError, with unchanged gradients, if the norm is not finite.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
    norm = norm_of_all(norm) / denominator
    if not math.isfinite(norm):
        raise NonFiniteError(f"the gradient's norm is {norm}")
    factor = min(1.0, max_norm / (norm + 1e-12)) / denominator
    for grad in grads:
        grad.mul_(factor)
    return norm


def take_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    rate: float,
    denominator: float,
    max_norm: float,
    norm_of_all: Callable[[float], float] = float,
) -> float:
    """Divide the summed gradients, clip them and step; return their norm before clipping.

    Raises NonFiniteError, with unchanged weights, if a gradient is not finite.
    """
    for parameter in parameters:
        # AdamW skips a parameter without gradient, momentum and decay included.
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    norm = scale_and_clip(parameters, denominator, max_norm, norm_of_all)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return norm


class Rows:
    """A `training_state.Sharding` whose optimizer has this rank's rows of each parameter."""

    def __init__(self, shards: Shards, world: World) -> None:
        self._shares = {id(share.parameter): share for share in shards.shares}
        self._rank = world.rank

    def own(self, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's rows of a parameter; the parameter itself if it is not trained."""
        share = self._shares.get(id(parameter))
        return parameter if share is None else share.own

    def box(self, parameter: nn.Parameter, local: Tensor) -> Box:
        """Place rows, or state that belongs to them, in the whole parameter."""
        share = self._shares[id(parameter)]
        shape = tuple(parameter.shape)
        if not shape:  # one rank has the number as a row, the others have none
            is_here = bool(local.numel())
            return Box(local.view(()) if is_here else local, (), (), is_written=is_here)
        start = min(self._rank * share.height, shape[0])
        return Box(local, (shape[0], *local.shape[1:]), (start, *(0 for _ in local.shape[1:])))


class Update:
    """AdamW over a model's trained parameters, or this rank's rows. Attribute: `optimizer`."""

    def __init__(self, model: nn.Module, config: TrainerConfig, world: World) -> None:
        self._model = model
        self._world = world
        self._shards: Shards | None = None
        self._divided = LocalRows([])
        self.sharding: Sharding = Shardings()
        """Maps the model's parameters to the optimizer's, for checkpoints."""
        named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        decays = {id(one): is_decayed(name, one) for name, one in named}
        trained = [one for _, one in named]
        if world.size == 1:
            self.optimizer = make_adamw(trained, config, list(decays.values()))
            return
        # In the order in which the optimizer numbers them, which is that of its state.
        trained.sort(key=lambda one: not decays[id(one)])
        divided = [one for one in trained if isinstance(one, DTensor)]
        self._divided = LocalRows(divided)
        self._shards = Shards([one for one in trained if not isinstance(one, DTensor)], world)
        self.sharding = Shardings([self._divided, Rows(self._shards, world)])
        order = [*divided, *(share.parameter for share in self._shards.shares)]
        self.optimizer = make_adamw(self._own, config, [decays[id(one)] for one in order])

    def step(self, rate: float, denominator: float, max_norm: float) -> float:
        """Sum gradients over the ranks, divide, clip, step; return the norm before clipping.

        Collective. Gradients of divided parameters are summed already. Raises NonFiniteError, with
        unchanged weights, if a gradient is not finite.
        """
        if self._shards is None:
            trained = [one for one in self._model.parameters() if one.requires_grad]
            return take_step(self.optimizer, trained, rate, denominator, max_norm)
        self._shards.reduce()
        self._divided.take_gradients()
        norm = take_step(self.optimizer, self._own, rate, denominator, max_norm, self._world.norm)
        for one in self._own:
            one.grad = None
        self._shards.gather()
        return norm

    @property
    def _own(self) -> list[nn.Parameter]:
        assert self._shards is not None  # noqa: S101 - for the type checker
        return [*self._divided.rows, *self._shards.own]

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for one in self._model.parameters():
            one.grad = None
