"""Replaced layers compute what the originals compute, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from asyncrl.trainer.cpu import layers as cpu_layers
from asyncrl.trainer.cpu.layers import OnednnLinear, speed_up


def _results(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradient of the input, gradients of the parameters."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    out = module(x)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
    grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    assert x.grad is not None
    return [out.detach(), x.grad, *grads]


@pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(40, 24), (1, 33, 24), (2, 24)])
@pytest.mark.parametrize("large", [0, 1 << 60], ids=["rows as they are", "rows filled up"])
def test_linear(
    bias: bool, shape: tuple[int, ...], large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_layers, "LARGE", large)
    torch.manual_seed(0)
    layer = nn.Linear(24, 10, bias=bias)
    x = torch.randn(shape)
    want = _results(layer, x)
    layer.__class__ = OnednnLinear
    for got, expected in zip(_results(layer, x), want, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("large", "rows"), [(33 * 240, 33), (33 * 240 + 1, 48)])
def test_rows_of_large_products_are_not_filled_up(
    large: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_layers, "LARGE", large)
    x = torch.randn(1, 33, 24)
    count, flat = cpu_layers.whole_rows(x, torch.empty(10, 24))
    assert (count, len(flat)) == (33, rows)
    assert torch.equal(flat[:33], x[0])
    assert not flat[33:].any()


@pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN"
)
def test_the_gradient_of_a_wide_layer_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(40, 24), torch.randn(40, 60)
    plain = cpu_layers.weight_gradient(x, grad)
    monkeypatch.setattr(cpu_layers, "TRANSPOSED_BLOCK", 1)
    turned = cpu_layers.weight_gradient(x, grad)
    assert (plain.stride(), turned.stride()) == ((24, 1), (1, 60))
    for got in (plain, turned):
        torch.testing.assert_close(got, grad.t() @ x, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    holder = nn.Sequential(LlamaRMSNorm(24, eps=1e-5)).to(dtype)
    nn.init.normal_(holder[0].weight)
    x = torch.randn(2, 7, 3, 24, dtype=dtype)
    want = _results(holder, x)
    assert speed_up(holder)[1] == 1
    for got, expected in zip(_results(holder, x), want, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)


def test_norm_gradient_is_right_in_float64() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, w: cpu_layers._RmsNorm.apply(a, w, 1e-5), (x, weight))


def test_another_norm_stays() -> None:
    holder = nn.Sequential(Gemma3RMSNorm(8))
    assert speed_up(holder)[1] == 0


def test_names_stay(model_path: Callable[[str], str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path("qwen3"))
    before = list(model.state_dict())
    products, norms = speed_up(model)
    assert norms == 2 * 4 + 1
    assert products in (0, 2 * 7 + 1)
    assert list(model.state_dict()) == before
