"""Repairs vLLM's sampling with drafts on a CPU, only where it is broken.

The C++ replacement of vLLM 0.32.0 for the Triton kernel `expand_kernel` (one value per request ->
one value per drafted position) gets an int64 *copy* of its output, so temperature, top-p and top-k
of drafted positions are uninitialised memory, and tokens are silently drawn from a wrong
distribution. Our own sampling does not depend on it; vLLM's own drafters, with which benchmarks
compare ours, do.

`apply_if_affected` is the entry point `vllm.general_plugins: asyncrl_cpu_sampling`: it runs in
every process that vLLM starts, before the replacements are registered.
"""

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_LOG = logging.getLogger("vllm.asyncrl.cpu_sampling")
_NAME = "_expand_kernel_impl"
_UNWRITTEN = -7.0

Expand = Callable[..., None]


def apply_if_affected() -> None:
    """Replace vLLM's `expand` for the CPU if it is there and loses its output. Idempotent."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.utils import cpu_triton_utils

    current_platform.import_kernels()
    _look_only_at_vllm()
    if writes_its_output(getattr(cpu_triton_utils, _NAME, None)):
        return
    setattr(cpu_triton_utils, _NAME, expand)
    _LOG.info(
        "replaced vLLM's `expand` for CPU sampling with drafts, which does not write its output"
    )


class _Vllm:
    """Stands for `sys` where vLLM looks for references to kernels that it replaces.

    Among all modules it would find llvmlite's handles, on which it fails, and names of torch that
    warn; and it would take half a second in each process.
    """

    @property
    def modules(self) -> dict[str, ModuleType]:
        return {name: one for name, one in sys.modules.items() if name.partition(".")[0] == "vllm"}


def _look_only_at_vllm() -> None:
    from vllm.triton_utils import dispatcher

    setattr(dispatcher, "sys", _Vllm())  # noqa: B010 - no type of a module


def writes_its_output(impl: Expand | None) -> bool:
    """Return True if an `expand` fills a float32 output as Triton's does; None: not needed."""
    if impl is None:
        return True
    output = torch.full((4,), _UNWRITTEN)
    impl(output, torch.tensor([0.5, 2.0]), torch.tensor([1, 4], dtype=torch.int32), 2, 3)
    return output.tolist() == [0.5, 3.0, 3.0, 3.0]


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: Any = None,  # noqa: ARG001, N803  (vLLM passes it by this name)
) -> None:
    """Fill `output [sum n_i]` with `input_val [B]`, value i repeated n_i times.

    `cu_num_tokens` `[B]` is the running sum of n_i. `replace_from` becomes `replace_to`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(input_val == replace_from, replace_to, input_val)
    total = int(counts.sum())
    output[:total] = torch.repeat_interleave(values, counts).to(output.dtype)
