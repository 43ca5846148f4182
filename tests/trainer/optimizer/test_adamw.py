"""AdamW with small or distant moments against torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.optimizer import optimizer
from asyncrl.trainer.optimizer.coded_moments import CODES
from asyncrl.trainer.optimizer.optimizer import SmallAdamW, Update, make_adamw, round_by_chance
from asyncrl.trainer.ranks.world import World

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
    monkeypatch.setitem(optimizer.SLICE, "cpu", 4)  # of several slices
    found = []
    for kind in (SmallAdamW, torch.optim.AdamW):
        model = _model(torch.float64)
        groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
        more = {"on_host": on_host} if kind is SmallAdamW else {}
        _train(model, kind(groups, **SETTINGS, **more), 5)
        found.append([one.detach() for one in model.parameters()])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("kind", "gap"), [(torch.bfloat16, 0.02), (torch.uint8, 0.1)])
def test_small_moments_stay_near_and_come_back_as_they_were(kind: torch.dtype, gap: float) -> None:
    exact, small = _model(torch.float32), _model(torch.float32)
    groups = [{"params": list(small.parameters())}]
    optimizer = SmallAdamW(groups, **SETTINGS, moments=kind, on_host=True)
    _train(exact, torch.optim.AdamW(exact.parameters(), **SETTINGS, weight_decay=0.0), 20)
    _train(small, optimizer, 20)
    before = _model(torch.float32)
    for start, want, got in zip(
        before.parameters(), exact.parameters(), small.parameters(), strict=True
    ):
        assert float((got - want).detach().norm()) < gap * float((want - start).detach().norm())
    for parameter, state in optimizer.state.items():
        as_kept = torch.float32 if kind == torch.uint8 and parameter.ndim < 2 else kind
        assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {as_kept}

    again = _model(torch.float32)
    again.load_state_dict(small.state_dict())
    other = SmallAdamW(
        [{"params": list(again.parameters())}], **SETTINGS, moments=kind, on_host=True
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


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_codes_are_near_everywhere_and_right_on_average(name: str) -> None:
    """Over a million to one within a block; rows of one block and a part of another."""
    torch.manual_seed(0)
    code = CODES[name]
    value = 10 ** torch.linspace(-5.5, 0, 300) * torch.tensor([[1.0], [1e-3]])
    value[0, 7] = 0
    if code.signed:
        value[:, ::2] *= -1
    codes, scales = code.encode(value)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.uint8, (2, 300), (2, 2))
    decoded = code.decode(codes, scales)
    real = value != 0
    share = (decoded[real] / value[real]).double()
    assert float(share.min()) > 1 / 1.13
    assert float(share.max()) < 1.13
    mean = torch.stack([code.decode(*code.encode(value)) for _ in range(2_000)]).double().mean(0)
    # A step is an eighth, so the mean's standard error is at most 0.06 / 45 of the value.
    torch.testing.assert_close(mean[real], value[real].double(), rtol=0.008, atol=0.0)
    again = code.decode(*code.encode(decoded))
    torch.testing.assert_close(again[real], decoded[real], rtol=1e-5, atol=0.0)


def test_a_second_moment_is_never_rounded_to_nothing() -> None:
    """A step is the first moment over the root of the second."""
    square = torch.tensor([[1.0, 1e-30, 0.0]])
    decoded = CODES["exp_avg_sq"].decode(*CODES["exp_avg_sq"].encode(square))
    assert decoded[0, 1:].tolist() == pytest.approx([1e-12, 1e-12])
    nothing = CODES["exp_avg_sq"].decode(*CODES["exp_avg_sq"].encode(torch.zeros(1, 3)))
    assert not nothing.any()


def test_settings_choose_the_optimizer() -> None:
    own = list(_model(torch.float32).parameters())
    decayed = [one.ndim >= 2 for one in own]
    assert isinstance(make_adamw(own, TrainerConfig(), decayed), torch.optim.AdamW)
    small = [{"optimizer_state": "bfloat16"}, {"optimizer_state": "int8"}]
    for settings in (*small, {"optimizer_offload": True}):
        assert isinstance(make_adamw(own, TrainerConfig(**settings), decayed), SmallAdamW)


def test_biases_and_norms_are_not_decayed_those_of_experts_either() -> None:
    model = nn.Module()
    shapes = {"experts": (2, 3, 3), "experts_bias": (2, 3), "weight": (3, 3), "norm": (3,)}
    for name, shape in shapes.items():
        model.register_parameter(name, nn.Parameter(torch.ones(shape)))
    update = Update(model, TrainerConfig(weight_decay=0.5, learning_rate=0.1), World(0, 1))
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    update.step(0.1, 1.0, 1.0)
    kept = {name for name, one in model.named_parameters() if bool((one == 1).all())}
    assert kept == {"experts_bias", "norm"}
