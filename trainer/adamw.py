"""AdamW with less memory on the device: moments in bfloat16, on the host, or both.

The arithmetic is AdamW's (arXiv 1711.05101, algorithm 2) in the parameter's type; only what is kept
from one step to the next differs. A moment in bfloat16 has 8 bits. Its change in a step, a
thousandth for the second moment, is mostly less than the last of them, and would be lost by
rounding to the nearest. Rounded up or down by chance, in proportion, the expected value is exact.

Slices of a parameter are brought to the device one after the other, so that there is never more
than one slice of float32 moments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

SLICE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Numbers of a parameter that are updated at a time, by the device."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class SmallAdamW(torch.optim.Optimizer):
    """AdamW; states have the names of torch's, so that each can read the other's.

    Attribute: `on_host`.

    Args:
        groups: as torch's optimizers take them.
        lr: learning rate.
        betas: decays of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled.
        moments: data type in which moments are kept; None: the parameter's.
        on_host: keep them in the host's memory.
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
        super().__init__(
            groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
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
        """As torch's, which would bring moments to the parameter's type and device."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            for name in _MOMENTS:
                state[name] = self._kept(state[name], parameter)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in _MOMENTS:
                empty = _local(parameter).new_empty(0)
                shape = _local(parameter).shape
                kind = self._moments or parameter.dtype
                place = "cpu" if self.on_host else empty.device
                pinned = self.on_host and empty.is_cuda
                state[name] = torch.zeros(shape, dtype=kind, device=place, pin_memory=pinned)
        state["step"] += 1
        steps, (first, second) = int(state["step"]), group["betas"]
        step_size = group["lr"] / (1 - first**steps)
        root = math.sqrt(1 - second**steps)
        whole = _local(parameter)
        grads = _local(parameter.grad).reshape(-1)  # type: ignore[arg-type]
        weights = whole.view(-1)
        size = SLICE.get(whole.device.type, SLICE["cuda"])
        for start in range(0, len(weights), size):
            part = slice(start, min(len(weights), start + size))
            mean, square = (
                state[name].view(-1)[part].to(whole.device, whole.dtype, non_blocking=True)
                for name in _MOMENTS
            )
            weight, grad = weights[part], grads[part]
            mean.lerp_(grad, 1 - first)
            square.mul_(second).addcmul_(grad, grad, value=1 - second)
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.addcdiv_(mean, (square.sqrt() / root).add_(group["eps"]), value=-step_size)
            for name, value in zip(_MOMENTS, (mean, square), strict=True):
                place = state[name].view(-1)[part]
                if place.data_ptr() != value.data_ptr():
                    place.copy_(self._rounded(value), non_blocking=True)

    def _rounded(self, value: Tensor) -> Tensor:
        return round_by_chance(value) if self._moments == torch.bfloat16 else value

    def _kept(self, moment: Tensor, parameter: Tensor) -> Tensor:
        place = torch.device("cpu") if self.on_host else parameter.device
        kept = moment.to(place, self._moments or parameter.dtype)
        return kept.pin_memory() if self.on_host and parameter.is_cuda else kept


def round_by_chance(value: Tensor) -> Tensor:
    """Float to bfloat16, up or down with the chances that make the expected value exact."""
    bits = value.float().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    return (bits + noise).bitwise_and_(-(1 << 16)).view(torch.float32).to(torch.bfloat16)


def _local(tensor: Tensor) -> Tensor:
    """A sharded tensor's part of this rank; any other itself."""
    to_local = getattr(tensor, "to_local", None)
    out: Tensor = tensor.detach() if to_local is None else to_local().detach()
    return out
