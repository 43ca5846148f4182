"""AdamW with small or distant moments against torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trainer import adamw
from trainer.adamw import SmallAdamW, round_by_chance
from trainer.config import TrainerConfig
from trainer.optimizer import make_adamw

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8}


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for one in model.parameters():
            one.grad = torch.randn(one.shape, generator=generator, dtype=torch.float64).to(one)
        optimizer.step()


@pytest.mark.parametrize("on_host", [False, True])
def test_whole_moments_give_torchs_steps(monkeypatch: pytest.MonkeyPatch, on_host: bool) -> None:
    monkeypatch.setitem(adamw.SLICE, "cpu", 4)  # parameters of several slices, the last one short
    found = []
    for kind in (SmallAdamW, torch.optim.AdamW):
        model = _model(torch.float64)
        groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
        more = {"on_host": on_host} if kind is SmallAdamW else {}
        _train(model, kind(groups, **SETTINGS, **more), 5)
        found.append([one.detach() for one in model.parameters()])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_small_moments_stay_near_and_come_back_as_they_were() -> None:
    exact, small = _model(torch.float32), _model(torch.float32)
    groups = [{"params": list(small.parameters())}]
    optimizer = SmallAdamW(groups, **SETTINGS, moments=torch.bfloat16, on_host=True)
    _train(exact, torch.optim.AdamW(exact.parameters(), **SETTINGS, weight_decay=0.0), 20)
    _train(small, optimizer, 20)
    before = _model(torch.float32)
    for start, want, got in zip(
        before.parameters(), exact.parameters(), small.parameters(), strict=True
    ):
        assert float((got - want).detach().norm()) < 0.02 * float((want - start).detach().norm())
    moments = [state[n] for state in optimizer.state.values() for n in ("exp_avg", "exp_avg_sq")]
    assert {one.dtype for one in moments} == {torch.bfloat16}

    again = _model(torch.float32)
    again.load_state_dict(small.state_dict())
    other = SmallAdamW(
        [{"params": list(again.parameters())}], **SETTINGS, moments=torch.bfloat16, on_host=True
    )
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, one in ((small, optimizer), (again, other)):
        torch.manual_seed(3)  # a checkpoint has the random state
        _train(model, one, 2, first=20)
    for mine, theirs in zip(small.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_rounding_by_chance_is_right_on_average() -> None:
    """A change of a thousandth, which rounding to the nearest would always lose."""
    torch.manual_seed(0)
    value = torch.tensor([1.001, -1.001, 3e-9, 0.0, -7.0])
    rounded = round_by_chance(value.repeat(20_000, 1))
    assert rounded.dtype == torch.bfloat16
    mean = rounded.double().mean(0)
    # A step of bfloat16 at 1 is 2**-7; the mean's standard error is below 2**-8 / 141 of that.
    torch.testing.assert_close(mean, value.double(), atol=2e-4, rtol=2e-4)
    assert float(value.bfloat16()[0]) == 1.0
    assert torch.equal(rounded[:, 4], torch.full((20_000,), -7.0, dtype=torch.bfloat16))


def test_settings_choose_the_optimizer() -> None:
    own = list(_model(torch.float32).parameters())
    assert isinstance(make_adamw(own, TrainerConfig()), torch.optim.AdamW)
    for settings in ({"optimizer_state": "bfloat16"}, {"optimizer_offload": True}):
        assert isinstance(make_adamw(own, TrainerConfig(**settings)), SmallAdamW)
