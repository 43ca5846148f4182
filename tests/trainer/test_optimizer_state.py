"""An optimizer's state comes back exactly as it was, without a pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainer.optimizer_state
from trainer.optimizer_state import load_state, save_state


def equal(left: Any, right: Any) -> bool:
    """Equality that distinguishes tuples from lists, ints from floats, and reads tensors."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


def stepped(**options: Any) -> torch.optim.AdamW:
    """AdamW of two groups after a step; a tied and a transposed parameter among them."""
    weight = torch.nn.Parameter(torch.randn(3, 4).t())
    layer = torch.nn.Linear(4, 3)
    layer.weight = torch.nn.Parameter(weight.t().contiguous())
    groups = [{"params": [weight, layer.weight]}, {"params": [layer.bias], "weight_decay": 0.5}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95), **options)
    for parameter in (weight, *layer.parameters()):
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "options",
    [
        {"fused": True, "lr": 1 / 3},
        {"lr": torch.tensor(0.1, dtype=torch.float64), "foreach": False},
        {"amsgrad": True, "maximize": True, "eps": 1e-300},
    ],
    ids=["fused", "lr is a tensor", "amsgrad"],
)
def test_it_comes_back_exactly(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer.optimizer_state, "_FILE_BYTES", 64)
    state = stepped(**options).state_dict()
    save_state(tmp_path / "optimizer", state)
    assert len(list((tmp_path / "optimizer").glob("*.safetensors"))) > 2
    before = torch.get_rng_state()
    loaded, random = load_state(tmp_path / "optimizer")
    assert equal(loaded, state)
    assert torch.equal(random["cpu"], before)


def test_what_is_neither_tensor_nor_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state.hook is a function"):
        save_state(tmp_path / "optimizer", {"hook": lambda: None})
