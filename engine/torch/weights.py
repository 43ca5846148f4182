"""New weights for a model that is serving: all checks first, then the copy."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.errors import WeightsError

_SHOWN = 5


def check_weights(
    model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (own tensor, new values) that cover every parameter once.

    Of tied parameters one name is enough; if several are given they must agree.

    Raises:
        WeightsError: names or shapes do not fit. Nothing was changed.
    """
    own: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
    given: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if name in given:
            raise WeightsError(f"weight {name!r} was given twice")
        given[name] = tensor
    _refuse("unexpected weights (not in the model)", [n for n in given if n not in own])
    _refuse(
        "weights of a wrong shape",
        [
            f"{n}: {tuple(t.shape)} given, {tuple(own[n].shape)} needed"
            for n, t in given.items()
            if t.shape != own[n].shape
        ],
    )
    chosen: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
    for name, tensor in given.items():
        target = own[name]
        first = chosen.setdefault(target.data_ptr(), (name, target, tensor))
        same = first[2].data_ptr() == tensor.data_ptr() or torch.equal(first[2], tensor)
        if not same:
            raise WeightsError(f"{first[0]!r} and {name!r} are one tied weight but differ")
    _refuse(
        "missing weights",
        [
            n
            for n, t in own.items()
            if isinstance(t, torch.nn.Parameter) and t.data_ptr() not in chosen
        ],
    )
    return [(target, tensor) for _, target, tensor in chosen.values()]


def copy_weights(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Overwrite in place what `check_weights` paired, converting dtype and device."""
    with torch.no_grad():
        for target, tensor in pairs:
            target.copy_(tensor)


def _refuse(what: str, wrong: list[str]) -> None:
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise WeightsError(f"{what}: {', '.join(wrong[:_SHOWN])}{more}; the weights stay as before")
