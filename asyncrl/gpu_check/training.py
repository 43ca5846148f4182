"""Parts about the trainer: a micro-batch and its MFU, and attention without padding."""

import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from asyncrl.gpu_check.drawing import milliseconds
from asyncrl.gpu_check.generating import LARGE, SMALL, random_model
from asyncrl.gpu_check.parts import Context, PartFailed, Said
from asyncrl.rollout.trajectory import Provenance, SampleId, TrajectoryBuilder, VerifiableTrajectory
from asyncrl.trainer.base.config import TrainerConfig
from asyncrl.trainer.learner import Learner
from asyncrl.trainer.model import varlen

GROUP_SIZE = 8
PROMPT = 16
"""Tokens of a prompt, which the samples of a group share."""
_ROUNDS = 5
_TOLERANCE = 0.02
"""Relative 16-bit error of outputs, and of gradients, which are sums of them."""


def trainer(context: Context) -> Said:
    """Time forward and backward of a group, and a step; compare with a matrix product."""
    length = 32 if context.small else 1024
    config = TrainerConfig(
        dtype="bfloat16" if context.gpus else "float32", device=context.device,
        micro_batch_tokens=GROUP_SIZE * length + PROMPT, correction="none", async_checkpoints=False,
    )  # fmt: skip
    learner = Learner(config, str(random_model(context)), group_size=GROUP_SIZE, seed=0)
    rewards = np.arange(GROUP_SIZE, dtype=np.float32)
    seconds = []
    for number in range(2 if context.small else 1 + _ROUNDS):
        group = group_of(number, length, learner.policy.vocab_size)
        began = _now(context)
        learner.add_group(group, rewards)
        seconds.append(_now(context) - began)
    began = _now(context)
    norm = learner.step().learning.grad_norm
    stepped = _now(context) - began
    each = statistics.median(seconds[1:])
    parameters = sum(one.numel() for one in learner.policy.model.parameters())
    flops = _flops(context, length)
    peak = _matrix_flops(context)
    numbers: dict[str, Any] = {
        "parameters": parameters, "tokens": GROUP_SIZE * length, "dtype": config.dtype,
        "first_seconds": seconds[0], "seconds": each, "step_seconds": stepped, "flop": flops,
        "matrix_tflop_a_second": peak / 1e12, "mfu": flops / each / peak, "grad_norm": norm,
    }  # fmt: skip
    if context.gpus:
        numbers["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if not norm > 0 or not np.isfinite(norm):
        raise PartFailed(f"the gradient's norm is {norm}", numbers)
    said = (
        f"{parameters / 1e6:,.1f}M parameters in {config.dtype}: {GROUP_SIZE * length:,} tokens in "
        f"{each:.3f} s, {numbers['mfu']:.0%} of a matrix product's {shown_flops(peak)}; a "
        f"step {stepped:.2f} s"
    )
    return said, numbers


def group_of(number: int, length: int, vocabulary: int) -> list[VerifiableTrajectory]:
    """Random samples of one prompt, each of `length` tokens."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(0, vocabulary, PROMPT).astype(np.int32)
    out = []
    for sample in range(GROUP_SIZE):
        tokens = rng.integers(0, vocabulary, length).astype(np.int32)
        guess = np.full(length, -np.log(vocabulary), np.float32)
        builder = TrajectoryBuilder(SampleId(number, sample), f"p{number}", prompt)
        builder.append(
            tokens=tokens, logprobs=guess, topk_ids=tokens[:, None], topk_logprobs=guess[:, None],
            noise_seeds=np.full(length, 17, np.uint64), policy_version=0,
            provenance=np.full(length, Provenance.SAMPLED, np.uint8),
        )  # fmt: skip
        out.append(builder.finish("length"))
    return out


def _now(context: Context) -> float:
    if context.gpus:
        torch.cuda.synchronize()
    return time.perf_counter()


def _flops(context: Context, length: int) -> float:
    """Return FLOPs of forward and backward: 6 per matrix weight and token, and causal attention."""
    shape = SMALL if context.small else LARGE
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    layer = hidden * (2 * heads + 2 * kv + 3 * shape["intermediate_size"])
    weights = shape["num_hidden_layers"] * layer + hidden * shape["vocab_size"]
    attention = 6 * shape["num_hidden_layers"] * heads * length  # 12, of which half is causal
    return GROUP_SIZE * length * (6.0 * weights + attention)


def shown_flops(flops: float) -> str:
    """Format FLOP/s for the user."""
    return f"{flops / 1e12:.2f} TFLOP/s" if flops >= 1e11 else f"{flops / 1e9:.1f} GFLOP/s"


def _matrix_flops(context: Context) -> float:
    size = 8192 if context.gpus and not context.small else 512
    kind = torch.bfloat16 if context.gpus else torch.float32
    one, other = (torch.randn(size, size, device=context.device).to(kind) for _ in range(2))
    if context.gpus:
        return 2 * size**3 / (milliseconds(lambda _: one @ other) / 1000)
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        _ = one @ other
        times.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(times)


def attention(context: Context) -> Said:
    """Compare varlen attention with SDPA in float32, output and gradients; time both."""
    length = 64 if context.small else 1024
    segments = [(0, length, 0, 0)]  # a prompt, and responses that share it
    segments += [(i * length, (i + 1) * length, 0, length) for i in range(1, GROUP_SIZE)]
    segments.append((GROUP_SIZE * length, GROUP_SIZE * length + length // 2, 0, 0))  # one alone
    tokens = segments[-1][1]
    keys = varlen.Keys.of(segments, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = [torch.randn(1, n, tokens, 128, generator=generator, device="cuda") for n in (16, 8, 8)]
    heads = [one.bfloat16().requires_grad_() for one in drawn]
    if not varlen.serves(heads[0]):
        raise PartFailed("varlen attention does not support bfloat16 on this GPU")
    direction = torch.randn(1, tokens, 16, 128, generator=generator, device="cuda")
    wide = [one.detach().float().requires_grad_() for one in heads]
    found = varlen.attend(heads[0], heads[1], heads[2], keys, scale=None, window=None)
    wanted = _by_sdpa(wide, segments)
    gaps = {"output": _relative(found, wanted)}
    gradients = torch.autograd.grad(found, heads, direction.to(found.dtype))
    right = torch.autograd.grad(wanted, wide, direction)
    for name, one, other in zip(("queries", "keys", "values"), gradients, right, strict=True):
        gaps[f"gradient of {name}"] = _relative(one, other)
    numbers: dict[str, Any] = {"tokens": tokens, "relative_errors": gaps}
    if bad := [f"{name} by {gap:.1%}" for name, gap in gaps.items() if not gap <= _TOLERANCE]:
        raise PartFailed(f"varlen attention differs from SDPA: {', '.join(bad)}", numbers)

    def both_ways(way: Any) -> float:
        low = direction.bfloat16()
        return milliseconds(lambda _: torch.autograd.grad(way(), heads, low))

    numbers["varlen_ms"] = both_ways(
        lambda: varlen.attend(heads[0], heads[1], heads[2], keys, scale=None, window=None)
    )
    numbers["sdpa_ms"] = both_ways(lambda: _by_sdpa(heads, segments))
    said = (
        f"{tokens:,} tokens, 16 heads over 8: varlen within {max(gaps.values()):.2%} of SDPA in "
        f"float32; forward and backward {numbers['varlen_ms']:.2f} ms, by SDPA "
        f"{numbers['sdpa_ms']:.2f} ms"
    )
    return said, numbers


def _by_sdpa(heads: list[Tensor], segments: list[tuple[int, int, int, int]]) -> Tensor:
    """Compute `[1, T, H, D]`, one segment after the other."""
    query, *others = heads
    out = []
    for start, end, place, shared in segments:
        keys, values = (
            torch.cat([one[:, :, place : place + shared], one[:, :, start:end]], 2)
            for one in others
        )
        columns = torch.arange(shared + end - start, device=query.device)
        seen = columns[None, :] <= columns[shared:, None]
        own = query[:, :, start:end]
        found = scaled_dot_product_attention(own, keys, values, attn_mask=seen, enable_gqa=True)
        out.append(found)
    return torch.cat(out, 2).transpose(1, 2)


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())
