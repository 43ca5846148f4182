"""Experts of a mixture in vLLM's layout: compared where it is the checkpoint's, named elsewhere.

No model runs: these modules have the names and shapes of vLLM 0.32.0's `MoERunner`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from asyncrl.engine.errors import WeightsError
from asyncrl.engine.vllm.worker.weights import VllmHeldWeights, check_reloadable
from asyncrl.wire.records.wrong_policy import compare_weights, not_compared
from asyncrl.wire.weights.fingerprint import fingerprint
from asyncrl.wire.weights.layout import Fingerprint

EXPERTS, INTERMEDIATE, HIDDEN = 4, 6, 5
GATE_UP, DOWN, ROUTER = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"


def policy(seed: int = 0) -> dict[str, torch.Tensor]:
    """A layer as in the HF state dict of Qwen3-MoE."""
    torch.manual_seed(seed)
    return {
        GATE_UP: torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN),
        DOWN: torch.randn(EXPERTS, HIDDEN, INTERMEDIATE),
        ROUTER: torch.randn(EXPERTS, HIDDEN),
    }


def held(weights: dict[str, torch.Tensor], backend: str, padding: int = 0) -> nn.Module:
    """The same layer in vLLM."""
    model, mlp, experts, routed = (nn.Module() for _ in range(4))
    gate_up = nn.functional.pad(weights[GATE_UP], (0, 0, 0, padding))
    routed.w13_weight = nn.Parameter(gate_up)
    routed.w2_weight = nn.Parameter(weights[DOWN].clone())
    routed.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend))
    experts.routed_experts = routed
    mlp.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
    mlp.gate.weight = nn.Parameter(weights[ROUTER].clone())
    mlp.experts, model.mlp = experts, mlp
    return model


def shapes(weights: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def fingerprint_of(model: nn.Module, weights: dict[str, torch.Tensor]) -> Fingerprint:
    """Taken in several pieces."""
    *pieces, found = VllmHeldWeights(model, shapes(weights)).fingerprint(elements=25)
    assert pieces == [None, None]
    assert found is not None
    return found


@pytest.mark.parametrize("backend", ["TRITON", "BATCHED_TRITON"])
def test_experts_in_the_layout_of_the_checkpoint_are_compared(backend: str) -> None:
    weights = policy()
    expected = fingerprint(weights.items())
    model = held(weights, backend)
    found = fingerprint_of(model, weights)
    assert not_compared(expected, found) == []
    assert compare_weights("g", 1, expected=expected, found=found) is None
    with torch.no_grad():
        model.mlp.experts.routed_experts.w13_weight[3, 7, 2] += 1e-6
    wrong = compare_weights("g", 1, expected=expected, found=fingerprint_of(model, weights))
    assert wrong is not None
    assert f"1 of 3 tensors differ ({GATE_UP})" in wrong.text


@pytest.mark.parametrize(
    ("backend", "padding", "named"),
    [
        ("FLASHINFER_CUTLASS", 0, [DOWN, GATE_UP]),
        ("CPU", 0, [DOWN, GATE_UP]),
        ("TRITON", 2, [GATE_UP]),
    ],
)
def test_experts_in_another_layout_are_named(backend: str, padding: int, named: list[str]) -> None:
    weights = policy()
    expected = fingerprint(weights.items())
    found = fingerprint_of(held(weights, backend, padding), weights)
    assert not_compared(expected, found) == named
    assert compare_weights("g", 1, expected=expected, found=found) is None, "no false alarm"


def test_experts_that_take_no_new_weights_are_refused() -> None:
    check_reloadable(held(policy(), "TRITON"))
    with pytest.raises(WeightsError, match=r"'mlp\.experts\.routed_experts' on a CPU.*kind: torch"):
        check_reloadable(held(policy(), "CPU"))
