"""Common parts of the fused layers of the torch engine and of the trainer on a CPU, in float32.

Both replace transformers' forward pass of some models (`engine.torch.cpu.fused_model`,
`trainer.cpu.fused`), and compare theirs with it at start.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.rollout.jit import kernels_of
from asyncrl.rollout.trajectory import FloatArray

LongArray = NDArray[np.int64]

kernel = kernels_of("rollout")

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
_LEAST, _MOST = np.float32(-87.0), np.float32(88.0)
_C2, _C3, _C4 = np.float32(0.5), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_C5, _C6, _C7 = (
    np.float32(8.3334519073e-3),
    np.float32(1.3981999507e-3),
    np.float32(1.9875691500e-4),
)

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Prefixes of transformers' classes that are pre-norm, rotary, gated by silu and nothing else."""
_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend on the position alone."""
SERIAL_PARAMETERS = 1 << 20
"""Parameters of a layer up to which several threads do not make it faster. The kernels use one."""


def why_not_fused(model: Any, *, threads: int) -> str | None:
    """Return why a loaded model runs through transformers' forward pass; None: it need not."""
    name, config = type(model).__name__, model.config
    if name not in {f"{family}ForCausalLM" for family in FAMILIES}:
        return f"{name} is not one of {', '.join(FAMILIES)}"
    if (model.device.type, model.dtype) != ("cpu", torch.float32):
        return f"it computes in {model.dtype} on {model.device.type}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act!r}"
    rotary = model.model.rotary_emb
    if getattr(rotary, "rope_type", "default") not in _ROTARY:
        return f"its rotary embedding is {rotary.rope_type!r}"
    if len(rotary.inv_freq) * 2 != head_size(config):
        return "it rotates part of a head"
    parameters = sum(p.numel() for p in model.model.layers[0].parameters())
    if threads > 1 and parameters > SERIAL_PARAMETERS:
        return f"its layers are large enough for {threads} threads"
    return None


def head_size(config: Any) -> int:
    """Return the size of one attention head, from transformers' configuration of the model."""
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


@kernel.of_vectors
def exp(x: np.float32) -> np.float32:
    """Compute e^x within 2 units in the last place, 0 below -87; a loop of it becomes vectors.

    Cephes' expf: 2^n times a polynomial on half a binade.
    """
    bounded = max(_LEAST, x)
    bounded = min(_MOST, bounded)
    n = np.floor(bounded * _LOG2_E + _HALF)
    r = bounded - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = _C7 * r + _C6
    p = p * r + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = p * r * r + r + _ONE
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * power if x >= _LEAST else np.float32(0)


@kernel.of_vectors
def inverse_size(states: FloatArray, epsilon: np.float32) -> np.float32:
    """Return the factor of an RMS norm (arXiv 1910.07467, eq. 4) of one vector."""
    squares = np.float32(0)
    for c in range(len(states)):
        squares += states[c] * states[c]
    return np.float32(_ONE / np.sqrt(squares / np.float32(len(states)) + epsilon))


@kernel.of_vectors
def gated(both: FloatArray, out: FloatArray) -> None:
    """SwiGLU: silu of the first half of `[T, 2 I]` times the second half, into `[T, I]`."""
    width = out.shape[1]
    for t in range(len(out)):
        gate, up, row = both[t, :width], both[t, width:], out[t]
        for i in range(width):
            row[i] = gate[i] / (_ONE + exp(-gate[i])) * up[i]
