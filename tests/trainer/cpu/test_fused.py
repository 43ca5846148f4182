"""The fused layers against transformers' forward pass: log-probabilities and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.trainer.cpu import fused
from asyncrl.trainer.cpu.fused import FusedDecoder
from asyncrl.trainer.cpu.layers import whole_blocks
from asyncrl.trainer.model import policy as policy_module
from asyncrl.trainer.model.packing import PackedBatch
from asyncrl.trainer.model.policy import Policy

ModelPath = Callable[[str], str]


def policy(path: str, *, fused: bool, dtype: Any = "float32", **settings: Any) -> Policy:
    return Policy(path, dtype=dtype, device=torch.device("cpu"), fused=fused, **settings)


def batch(lengths: list[tuple[int, int]], *, alike: bool) -> PackedBatch:
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, 32, lengths[0][0]).astype(np.int32)
    pairs = []
    for size, answer in lengths:
        own = prompt if alike else rng.integers(0, 32, size).astype(np.int32)
        pairs.append((own, rng.integers(0, 32, answer).astype(np.int32)))
    return PackedBatch.of(pairs, torch.device("cpu"))


def gradients(one: Policy, rows: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    scores = one.score(rows)
    weights = torch.linspace(-1, 1, len(scores.logprobs), dtype=scores.logprobs.dtype)
    (scores.logprobs * weights).sum().backward()
    found = {n: p.grad.double() for n, p in one.model.named_parameters() if p.grad is not None}
    return scores.logprobs.detach().double(), found


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("lengths", [[(3, 5), (3, 1), (3, 40)], [(1, 90), (1, 2)], [(4, 7)]])
def test_fused_layers_are_as_close_to_float64_as_transformers(
    model_path: ModelPath, name: str, alike: bool, lengths: list[tuple[int, int]]
) -> None:
    path, rows = model_path(name), batch(lengths, alike=alike)
    exact, exact_grads = gradients(policy(path, fused=False, dtype="float64"), rows)
    own = policy(path, fused=True)
    assert own.is_fused
    logprobs, grads = gradients(own, rows)
    assert (logprobs - exact).abs().max() < 1e-5
    assert grads.keys() == exact_grads.keys()
    for key, grad in grads.items():
        size = exact_grads[key].norm()
        assert (grad - exact_grads[key]).norm() < 1e-5 * size + 1e-7, key


def test_wide_layers_keep_transformers_mlp_and_its_gradients(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rows = model_path("qwen3"), batch([(3, 5), (3, 40)], alike=True)
    _, expected = gradients(policy(path, fused=True), rows)
    monkeypatch.setattr(fused, "MAX_JOINED", 1)
    monkeypatch.setattr(fused._Gated, "apply", lambda *_: pytest.fail("too wide to be joined"))
    own = policy(path, fused=True)
    assert own.is_fused
    for key, grad in gradients(own, rows)[1].items():
        torch.testing.assert_close(grad, expected[key], atol=1e-5, rtol=1e-4)


def test_long_sequences_go_through_transformers(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_module, "MAX_LENGTH", 8)
    own, rows = policy(model_path("llama"), fused=True), batch([(3, 20)], alike=True)
    monkeypatch.setattr(own._fused, "hidden", lambda *_: pytest.fail("too long for it"))
    assert torch.isfinite(own.score(rows).logprobs).all()


@pytest.mark.parametrize("name", ["gpt2", "granite", "mistral_window"])
def test_other_models_keep_their_own_forward_pass(
    model_path: ModelPath, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "asyncrl.trainer.model.policy"):
        assert not policy(model_path(name), fused=True).is_fused
    assert "training through transformers' forward pass: " in caplog.text


def test_a_switch_turns_it_off(model_path: ModelPath) -> None:
    assert not policy(model_path("llama"), fused=False).is_fused
    assert not policy(model_path("llama"), fused=True, gradient_checkpointing=True).is_fused
    assert not policy(model_path("llama"), fused=True, dtype="bfloat16").is_fused
    assert not policy(model_path("llama"), fused=True, dtype="float64").is_fused


def test_packed_rows_come_in_few_sizes() -> None:
    sizes = {whole_blocks(rows) for rows in range(1, 8193)}
    assert len(sizes) < 80
    assert all(rows <= whole_blocks(rows) <= rows + max(15, rows // 8) for rows in range(1, 8193))


def test_layers_that_compute_something_else_are_not_used(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = FusedDecoder.hidden
    monkeypatch.setattr(FusedDecoder, "hidden", lambda *args: right(*args) * 1.01)
    assert not policy(model_path("llama"), fused=True).is_fused
    assert "their results differ by" in caplog.text


@pytest.mark.parametrize("kernel", ["norm_backward", "gated_backward", "rotate_backward"])
def test_layers_with_other_gradients_are_not_used(
    model_path: ModelPath,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kernel: str,
) -> None:
    right = getattr(fused, kernel)

    def wrong(*args: Any) -> None:
        right(*args)
        for array in args[-2:]:
            array *= np.float32(1.01)

    monkeypatch.setattr(fused, kernel, wrong)
    assert not policy(model_path("qwen3"), fused=True).is_fused
    assert "their results differ by" in caplog.text
