"""Float32 logits of 16-bit factors; what CUDA computes is looked at on tensors without numbers."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.rollout.model_parts import float32_logits


@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_not_rounded_to_the_type_of_their_factors(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = 4 * torch.randn(2, 3, 64, generator=generator).bfloat16()
    weight = torch.randn(97, 64, generator=generator).bfloat16()
    add = torch.randn(97, generator=generator).bfloat16() if bias else None
    exact = torch.nn.functional.linear(
        hidden.double(), weight.double(), None if add is None else add.double()
    )
    found = float32_logits(hidden, weight, add)
    rounded = torch.nn.functional.linear(hidden, weight, add)
    assert found.dtype == torch.float32
    assert float((found - exact).abs().max()) < 1e-4
    assert float((rounded - exact).abs().max()) > 0.03


@pytest.mark.parametrize("bias", [False, True])
def test_on_cuda_the_weight_is_not_copied(bias: bool) -> None:
    made: list[torch.Size] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                made.append(out.shape)
            return out

    with FakeTensorMode():
        hidden = torch.empty(2, 3, 64, device="cuda", dtype=torch.bfloat16)
        weight = torch.empty(97, 64, device="cuda", dtype=torch.bfloat16)
        add = torch.empty(97, device="cuda", dtype=torch.bfloat16) if bias else None
        with Noting():
            found = float32_logits(hidden, weight, add)
    assert (found.dtype, tuple(found.shape)) == (torch.float32, (2, 3, 97))
    assert torch.Size([97, 64]) not in made
