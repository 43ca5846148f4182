"""The repair of vLLM's sampling with drafts on a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.vllm
def test_the_repair_is_needed_here_and_works() -> None:
    """In a process of its own: importing vLLM's CPU code changes much of this one."""
    script = """
import torch
from vllm.platforms import current_platform
if current_platform.is_cpu():
    from vllm.utils import cpu_triton_utils as kernels
    from asyncrl.engine.vllm.cpu_sampling import apply_if_affected, expand, writes_its_output
    current_platform.import_kernels()
    original = kernels._expand_kernel_impl
    print("original writes:", writes_its_output(original))
    apply_if_affected()
    print("repaired:", kernels._expand_kernel_impl is expand)
    print("repaired writes:", writes_its_output(kernels._expand_kernel_impl))
    apply_if_affected()
    print("still:", kernels._expand_kernel_impl is expand)
    # What the original does right, integers of 8 bytes, the repair does alike.
    values, ends = torch.tensor([5, 2, 9]), torch.tensor([1, 1, 4])
    outputs = [torch.full((4,), -7), torch.full((4,), -7)]
    for kernel, output in zip((original, expand), outputs):
        kernel(output, values, ends, 9, 1)
    print("same:", outputs[0].tolist() == outputs[1].tolist() == [5, 1, 1, 1])
    # Its start fails without the repair where numba is loaded.
    import llvmlite.binding
    current_platform.register_triton_kernel_overrides()
    from vllm.v1.sample import rejection_sampler
    print("replaced:", rejection_sampler.expand_kernel.func is expand)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    facts = [line for line in done.stdout.splitlines() if ":" in line]
    if not facts:
        pytest.skip("this vLLM runs on a GPU: the repair is not for it")
    assert facts == [
        "original writes: False",
        "repaired: True",
        "repaired writes: True",
        "still: True",
        "same: True",
        "replaced: True",
    ]
