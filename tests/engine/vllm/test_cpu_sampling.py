"""The repair of vLLM's sampling with drafts on a CPU."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest
from served_vllm import REAL_VLLM

from asyncrl.engine.vllm.client.fork_server import ForkContext, start_server

pytestmark = REAL_VLLM
_SECONDS = 120.0


def _look(said: Connection) -> None:
    """Send what is found. In a process that has imported vLLM and computed nothing."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        said.send({})
        return
    from vllm.utils import cpu_triton_utils as kernels

    from asyncrl.engine.vllm.cpu_sampling import apply_if_affected, expand, writes_its_output

    current_platform.import_kernels()
    found = {}
    original = kernels._expand_kernel_impl
    found["original writes"] = writes_its_output(original)
    apply_if_affected()
    found["repaired"] = kernels._expand_kernel_impl is expand
    found["repaired writes"] = writes_its_output(kernels._expand_kernel_impl)
    apply_if_affected()
    found["still"] = kernels._expand_kernel_impl is expand
    # What the original does right, integers of 8 bytes, the repair does alike.
    values, ends = torch.tensor([5, 2, 9]), torch.tensor([1, 1, 4])
    outputs = [torch.full((4,), -7), torch.full((4,), -7)]
    for kernel, output in zip((original, expand), outputs, strict=True):
        kernel(output, values, ends, 9, 1)
    found["same"] = outputs[0].tolist() == outputs[1].tolist() == [5, 1, 1, 1]
    # Its start fails without the repair where numba is loaded.
    import llvmlite.binding  # noqa: F401

    current_platform.register_triton_kernel_overrides()
    from vllm.v1.sample import rejection_sampler

    found["replaced"] = rejection_sampler.expand_kernel.func is expand
    said.send(found)


def test_the_repair_is_needed_here_and_works() -> None:
    """In a process of its own: importing vLLM's CPU code changes much of this one."""
    start_server()
    reader, writer = ForkContext().Pipe(duplex=False)
    process = ForkContext().Process(target=_look, args=(writer,))
    process.start()
    writer.close()
    assert reader.poll(_SECONDS)
    found = reader.recv()
    process.join(_SECONDS)
    assert process.exitcode == 0
    if not found:
        pytest.skip("this vLLM runs on a GPU: the repair is not for it")
    assert found.pop("original writes") is False
    assert all(found.values()), found
