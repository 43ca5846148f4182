"""Attention with capped scores and sinks, block by block, equals the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncrl.trainer.model import packing as module
from asyncrl.trainer.model.packing import capped_attention


def _defined(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: int | None, cap: float
) -> Tensor:
    """One query and one head at a time, from the formula."""
    out = torch.zeros_like(query)
    groups = query.shape[1] // key.shape[1]
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            for at in range(query.shape[2]):
                first = 0 if window is None else max(0, at + 1 - window)
                keys = key[b, h // groups, first : at + 1]
                score = cap * torch.tanh(keys @ query[b, h, at] * 0.3 / cap)
                weight = score.exp()
                total = weight.sum() + (0 if sinks is None else sinks[h].exp())
                out[b, h, at] = (weight / total) @ value[b, h // groups, first : at + 1]
    return out


@pytest.mark.parametrize("budget", [1, 200, 1 << 20])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_value_and_gradients_follow_the_definition(
    budget: int, window: int | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SCORE_BUDGET", budget)
    torch.manual_seed(1)
    shapes = ((2, 4, 9, 5), (2, 2, 9, 5), (2, 2, 9, 5))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if has_sinks else None
    got = capped_attention(*inputs, scale=0.3, window=window, softcap=0.8, sinks=sinks)
    want = _defined(*inputs, sinks, window, 0.8)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    wanted = inputs if sinks is None else [*inputs, sinks]
    direction = torch.randn_like(got)
    ours = torch.autograd.grad((got * direction).sum(), wanted)
    theirs = torch.autograd.grad((want * direction).sum(), wanted)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
