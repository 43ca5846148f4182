"""Whether an engine's precision sends tokens to the experts that the trainer sends them to.

    python -m benchmarks.routing [--quick] [--model PATH] [--sglang] [--json FILE]

A mixture of experts is not continuous: a rounding error near a tie sends a token to another expert,
and its log-probability jumps. The trainer computes in float32, or in bfloat16 by autocast over
float32 weights; engines compute in bfloat16 with rounded weights. Here one set of tokens is
computed in each way, and compared: the share of (token, layer) whose set
of experts differs, and how far log-probabilities are off where all layers agree and where not.
Without --model: a random Qwen3-MoE, 4 layers, 16 experts, 2 a token. Floats of another order of
summation (kernels of engines) come on top. With --sglang the choices and log-probabilities of a
running SGLang, on a CPU, are compared as well.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engine.sglang.worker.plugin import MARK_VARIABLE
from asyncrl.trainer.model.packing import PackedBatch
from asyncrl.trainer.model.policy import Policy, why_no_routes
from benchmarks.harness import parser_of, pick, report, sglang_python, table

CPU = torch.device("cpu")
PROMPT = 16
SGLANG_SECONDS = 600.0
ROOT = Path(__file__).parents[1]


def random_mixture(folder: str) -> str:
    """A random Qwen3-MoE whose routers are neither flat nor certain."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=512, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, intermediate_size=128, num_experts=16,
            num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
            max_position_embeddings=512,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def computed(policy: Policy, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """`[N]` log-probabilities, and `[N, layers, K]` chosen experts in ascending order."""
    scores = policy.score(batch, with_routes=True)
    assert scores.routes is not None
    chosen = [
        one.topk(scores.routes.experts_per_token, -1).indices.sort(-1).values
        for one in scores.routes.logits
    ]
    return scores.logprobs.float(), torch.stack(chosen, 1)


def of_sglang(path: str, texts: NDArray[np.int32], dtype: str) -> tuple[Tensor, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "tokens.npy", Path(folder) / "out.npz"
        np.save(asked, texts)
        variables = os.environ | {
            MARK_VARIABLE: "1",
            "SGLANG_PLUGINS": "none",  # of ours only the platform
            "SGLANG_PLATFORM": "asyncrl_cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
        arguments = [path, dtype, str(asked), str(answered)]
        subprocess.run(
            [sglang_python(), "-m", "benchmarks.routing_sglang", *arguments],
            env=variables,
            cwd=ROOT,
            check=True,
            timeout=SGLANG_SECONDS,
        )
        found = np.load(answered)
        routes, logprobs = found["routes"][:, PROMPT - 1 : -1], found["logprobs"][:, PROMPT:]
    chosen = torch.from_numpy(routes).flatten(0, 1).long().sort(-1).values
    return torch.from_numpy(logprobs).flatten(), chosen


def measure(path: str, samples: int, tokens: int, *, sglang: bool = False) -> dict[str, Any]:
    """The comparison for responses of random tokens."""
    policy = Policy(path, dtype="float32", device=CPU)
    reason = why_no_routes(policy.model)
    if reason is not None:
        raise SystemExit(f"{path}: {reason}")
    rng = np.random.default_rng(2)
    texts = rng.integers(0, policy.vocab_size, (samples, tokens + PROMPT)).astype(np.int32)
    batch = PackedBatch.of([(one[:PROMPT], one[PROMPT:]) for one in texts], CPU)
    want, experts = computed(policy, batch)
    ways = {"trainer bfloat16 (autocast)": Policy(path, dtype="bfloat16", device=CPU)}
    rounded = Policy(path, dtype="bfloat16", device=CPU)
    with torch.no_grad():
        for parameter in rounded.model.parameters():
            parameter.copy_(parameter.bfloat16())
    ways["engine bfloat16 (rounded weights)"] = rounded
    trainer, engine = (computed(one, batch) for one in ways.values())
    ways_found = {
        "float32, trainer bfloat16 (autocast)": compared((want, experts), trainer),
        "float32, engine bfloat16 (rounded weights)": compared((want, experts), engine),
        "trainer bfloat16, engine bfloat16": compared(trainer, engine),
    }
    if sglang:
        ways_found |= {
            "trainer float32, SGLang float32": compared(
                (want, experts), of_sglang(path, texts, "float32")
            ),
            "trainer bfloat16, SGLang bfloat16": compared(
                trainer, of_sglang(path, texts, "bfloat16")
            ),
        }
    return {"tokens": len(want), "layers": experts.shape[1], "pairs": ways_found}


def compared(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> dict[str, float | None]:
    """Of two ways to compute the same tokens, each as `computed` gives it."""
    differs = (one[1] != other[1]).any(-1)
    moved = differs.any(-1)
    gap = (one[0] - other[0]).abs()
    return {
        "share_of_choices_that_differ": float(differs.float().mean()),
        "share_of_tokens_with_one": float(moved.float().mean()),
        "logprob_gap_mean_same_experts": _mean(gap[~moved]),
        "logprob_gap_mean_other_experts": _mean(gap[moved]),
    }


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


def main(given: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "fewer tokens")
    parser.add_argument("--model", help="a model directory or hub id; default: a random mixture")
    parser.add_argument("--sglang", action="store_true", help="also a running SGLang")
    options = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or random_mixture(folder)
        sizes = pick(options, (32, 240), (8, 112), (2, 24))
        found = measure(model, *sizes, sglang=options.sglang)
    shares = {pair: one["share_of_choices_that_differ"] for pair, one in found["pairs"].items()}
    rows = ((pair, *one.values()) for pair, one in found["pairs"].items())
    columns = "pair,choices that differ,tokens with one,gap where all agree,gap where not"
    shown = table(f"{found['tokens']} tokens", columns, rows)
    report(options, "routing", found, shares, shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
