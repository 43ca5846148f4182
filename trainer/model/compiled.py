"""Transformer blocks, compiled: norms, rotation, activations and residuals in one pass each.

    block   norm ─ products ─ rotation │ attention │ product ─ residual ─ norm ─ MLP ─ residual
            └──────── compiled ───────┘             └─────────────── compiled ─────────────────┘

One block is compiled for all of them: weights are its inputs, and the number of tokens is a
variable, so no micro-batch triggers a recompilation. Attention and, on a CPU, oneDNN's products are
called unchanged; the compiler does not look into them.

`results_of` and `where_different` check that two computations agree in value and gradient.
"""

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.trainer.base.errors import UnsupportedModelError
from asyncrl.trainer.cpu.layers import linear_forward, product, weight_gradient, whole_rows
from asyncrl.trainer.model.packing import ATTENTION_NAME, packed_attention

logger = logging.getLogger(__name__)

BACKEND = "inductor"


def results_of(run: Callable[[], Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the output of `run`, and gradients of a function of it by some parameters."""
    with torch.enable_grad():
        out = run()
        direction = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
        trained = [one for one in parameters if one.requires_grad]
        grads = torch.autograd.grad((out * direction).sum(), trained) if trained else ()
    return [out.detach(), *grads]


def where_different(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-3
) -> str | None:
    """Describe the first difference of `results_of` that exceeds rounding, or return None."""
    size = max((float(one.norm()) for one in theirs[1:]), default=0.0)
    for one, other in zip(ours, theirs, strict=True):
        gap, whole = float((one - other).norm()), float(other.norm())
        if not gap <= tolerance * (whole + 0.01 * size):
            return f"by {gap:.2g} of {whole:.2g}"
    return None


def compile_blocks(
    model: nn.Module, name: str, run: Callable[[], Tensor], dtype: torch.dtype
) -> None:
    """Compile every block of a model in place, and compare with its results before.

    `run` computes hidden states of some tokens. Names and parameters stay the same. Raises
    UnsupportedModelError if the model cannot be compiled here, or its results change.
    """
    blocks = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not blocks:
        raise UnsupportedModelError(
            f"{name}: {type(model).__name__} has no blocks to compile; set trainer.compile: false"
        )
    began = time.monotonic()
    parameters = list(blocks[0].parameters())
    before = results_of(run, parameters)
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(packed_attention))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's warnings about its own work
            for block in blocks:
                block.compile(dynamic=True, backend=BACKEND)
            after = results_of(run, parameters)
    except RuntimeError as error:  # the base of torch's errors
        raise UnsupportedModelError(
            f"{name} cannot be compiled here, so set trainer.compile: false ({_reason(error)})"
        ) from error
    gap = where_different(after, before, 0.05 if dtype.itemsize < 4 else 1e-3)
    if gap is not None:
        raise UnsupportedModelError(
            f"{name} computes other results when compiled ({gap}); set trainer.compile: false"
        )
    logger.info("compiled %d blocks in %.0f s", len(blocks), time.monotonic() - began)


def _reason(error: Exception) -> str:
    """First lines of an error; the very first may only name the compiler's part."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


@torch.library.custom_op("asyncrl::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`asyncrl.trainer.cpu.layers.fast_linear`, of which a compiler knows only the shapes."""
    return linear_forward(x, weight, bias)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("asyncrl::linear_backward", mutates_args=())
def linear_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `x` and of the weight."""
    rows, flat_grad = whole_rows(grad, weight)
    _, flat = whole_rows(x, weight)
    for_x = product(flat_grad, weight.t())[:rows].view(x.shape)
    return for_x, weight_gradient(flat, flat_grad).contiguous()  # as the compiler expects


@linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    x, weight = ctx.saved_tensors
    for_x, for_weight = linear_backward(grad, x, weight)
    return for_x, for_weight, grad.flatten(0, -2).sum(0) if ctx.has_bias else None


linear.register_autograd(_backward, setup_context=_keep)
