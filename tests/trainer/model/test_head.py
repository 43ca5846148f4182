"""Log-probabilities a block at a time equal those of all logits at once, value and gradient."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from asyncrl.rollout.truncation import EVERYTHING, Truncation
from asyncrl.trainer.cpu.layers import OnednnLinear, onednn_is_faster
from asyncrl.trainer.model import head as module
from asyncrl.trainer.model.head import LogitMap, Processing, process, score_tokens

ROWS, WIDTH, VOCABULARY = 23, 12, 41


def _problem(dtype: torch.dtype, *, bias: bool = False) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for one in layer.parameters():
            one.copy_(torch.randn(one.shape, generator=generator, dtype=dtype))
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=dtype)
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    targets[::3] = layer(hidden).argmax(1)[::3]  # some that truncation leaves in
    return layer, hidden, targets, torch.randn(ROWS, generator=generator, dtype=dtype)


def _all_at_once(layer: nn.Linear, hidden: Tensor, targets: Tensor, how: Processing) -> object:
    """The definition, written with autograd."""
    x = layer(hidden) * how.logits.scale
    if how.logits.softcap is not None:
        x = how.logits.softcap * torch.tanh(x / how.logits.softcap)
    return process(x, targets, Processing(LogitMap(how.logits.temperature), how.truncation))


@pytest.mark.parametrize(
    "truncation",
    [EVERYTHING, Truncation(top_p=0.7), Truncation(top_k=5), Truncation(min_p=0.2)],
    ids=str,
)
@pytest.mark.parametrize(
    "logits",
    [LogitMap(), LogitMap(temperature=0.7), LogitMap(1.3, scale=0.25), LogitMap(0.8, 1.5, 2.0)],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True])
def test_blocks_equal_all_logits_at_once(
    monkeypatch: pytest.MonkeyPatch, truncation: Truncation, logits: LogitMap, bias: bool
) -> None:
    layer, hidden, targets, above = _problem(torch.float64, bias=bias)
    how = Processing(logits, truncation)
    monkeypatch.setitem(module.BLOCK, "cpu", 5 * VOCABULARY)  # of 5 rows, or 8 columns
    found = []
    for score in (_all_at_once, score_tokens):
        x = hidden.clone().requires_grad_()
        scores = score(layer, x, targets, how)
        wanted = [x, *layer.parameters()]
        grads = torch.autograd.grad((scores.logprobs * above).sum(), wanted)
        found.append([scores.logprobs, scores.entropy, scores.outside.double(), *grads])
    assert float(found[0][-1].abs().max()) > 1e-3
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)
    if truncation.is_active:
        assert 0 < float(found[0][2].sum()) < ROWS


def test_the_backward_pass_may_be_repeated_and_frozen_heads_have_no_gradient() -> None:
    """Losses with parts go back twice; a reference or an adapter leaves the head as it is."""
    layer, hidden, targets, above = _problem(torch.float64)
    layer.requires_grad_(requires_grad=False)
    x = hidden.clone().requires_grad_()
    loss = (score_tokens(layer, x, targets, Processing(LogitMap())).logprobs * above).sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert layer.weight.grad is None


@pytest.mark.skipif(not onednn_is_faster(), reason="oneDNN is not used on this processor")
def test_float32_products_by_onednn_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.BLOCK, "cpu", ROWS * 20)
    layer, hidden, targets, above = _problem(torch.float32)
    found = []
    for kind in (nn.Linear, OnednnLinear):
        layer.__class__ = kind
        x = hidden.clone().requires_grad_()
        scores = score_tokens(layer, x, targets, Processing(LogitMap()))
        grads = torch.autograd.grad((scores.logprobs * above).sum(), [x, layer.weight])
        found.append([scores.logprobs, scores.entropy, *grads])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_low_precision_rounds_products_and_nothing_else() -> None:
    layer, hidden, targets, above = _problem(torch.float32)
    exact = score_tokens(layer, hidden, targets, Processing(LogitMap()))
    x = hidden.clone().requires_grad_()
    low = score_tokens(layer, x, targets, Processing(LogitMap()), torch.bfloat16)
    (low.logprobs * above).sum().backward()
    assert low.logprobs.dtype == torch.float32
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    gap = (low.logprobs - exact.logprobs).detach().abs().max()
    assert 0 < float(gap) < 0.2


@pytest.mark.parametrize(
    "truncation", [EVERYTHING, Truncation(top_k=5, top_p=0.7, min_p=0.2)], ids=str
)
def test_the_host_waits_for_nothing(
    truncation: Truncation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without data: whatever asks for a number fails."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # knows no meta device
    layer = nn.Linear(WIDTH, VOCABULARY, device="meta")
    hidden = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    targets = torch.empty(ROWS, dtype=torch.int64, device="meta")
    how = Processing(LogitMap(0.7), truncation)
    for scores in (score_tokens(layer, hidden, targets, how), process(layer(hidden), targets, how)):
        (grad,) = torch.autograd.grad(scores.logprobs.sum(), hidden)
        assert grad.shape == hidden.shape
    with pytest.raises(RuntimeError, match="meta"):
        float(grad.sum())


def test_a_gpu_in_16_bits_keeps_logits_in_float32() -> None:
    """On tensors without numbers."""
    plan = module._Plan(Processing(LogitMap()), module._Products(), torch.bfloat16)
    with FakeTensorMode():
        hidden = torch.empty(ROWS, WIDTH, device="cuda", dtype=plan.dtype)
        weight = torch.empty(VOCABULARY, WIDTH, device="cuda", dtype=plan.dtype)
        product = plan.products.forward(hidden, weight, None)
        assert product.dtype == plan.logits(hidden, weight, None).dtype == torch.float32
        grad = torch.empty_like(product, dtype=plan.dtype)
        assert plan.products.for_input(grad, weight).dtype == torch.bfloat16
        assert plan.products.forward(hidden.cpu(), weight.cpu(), None).dtype == torch.bfloat16
