"""A prototype: a packed row of tokens over several ranks, by all-to-all over heads (0058).

    python -m benchmarks.context_parallel --ranks 2 --tokens 8192 [--json FILE]

Each rank has a slice of the row. Everything but attention is by token, so it needs nothing of the
others. Before attention the ranks exchange slices for heads: each then has all tokens of some
heads, and `trainer.model.packing.packed_attention` is called as it is. Afterwards they exchange
back.

    [H, T/P] ── all-to-all ──► [H/P, T] ── packed attention ──► [H/P, T] ── all-to-all ──► [H, T/P]

Gradients are sums over tokens, so those of the ranks add up to that of the row. They are compared
with one process's. Printed are seconds, and of rank 0 peak memory and what it sent, in MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import AttentionInterface

from asyncrl.trainer.model.packing import Family, Layout, packed_attention
from asyncrl.trainer.ranks.world import World, join
from benchmarks.report import add_smoke, write_json

NAME = "context_parallel"
VOCABULARY = 64


class _Exchange(torch.autograd.Function):
    """`[P, ...]`: part i of rank j becomes part j of rank i; so does its gradient."""

    sent = 0
    """Bytes that this rank sent to others."""

    @staticmethod
    def forward(_ctx: Any, parts: Tensor) -> Tensor:
        return _Exchange.swap(parts)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return _Exchange.swap(grads[0])

    @staticmethod
    def swap(parts: Tensor) -> Tensor:
        out = torch.empty_like(parts := parts.contiguous())
        dist.all_to_all_single(out, parts)
        _Exchange.sent += parts.nbytes * (len(parts) - 1) // len(parts)
        return out


def to_heads(x: Tensor, ranks: int) -> Tensor:
    """`[1, H, T/P, D]` of a slice to `[1, H/P, T, D]` of all slices."""
    parts = _Exchange.apply(x[0].unflatten(0, (ranks, -1)))
    return parts.transpose(0, 1).flatten(1, 2)[None]


def to_slice(x: Tensor, ranks: int) -> Tensor:
    """`[1, T, H/P, D]` to `[1, T/P, H, D]`: undoes `to_heads`, as attention returns it."""
    parts = _Exchange.apply(x[0].unflatten(0, (ranks, -1)))
    return parts.transpose(0, 1).flatten(1, 2)[None]


def attention_over(ranks: int) -> Any:
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any
    ) -> tuple[Tensor, None]:
        whole = [to_heads(one, ranks) for one in (query, key, value)]
        out, _ = packed_attention(module, *whole, mask, **more)
        return to_slice(out, ranks), None

    return attention


def model_of(layers: int, hidden: int) -> Any:
    """A random Qwen3 in float64 with 8 heads and 4 of keys and values."""
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        max_position_embeddings=1 << 17,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return model.eval()


def measure(world: World, tokens: int, layers: int, hidden: int) -> dict[str, Any]:
    """Forward and backward of three packed sequences that share a prompt; the gradients too."""
    model = model_of(layers, hidden)
    if world.size > 1:
        AttentionInterface.register(NAME, attention_over(world.size))
        model.set_attn_implementation(NAME)
    else:
        AttentionInterface.register(NAME, packed_attention)
        model.set_attn_implementation(NAME)
    shared = tokens // 8
    own = [(tokens - shared) // 2, (tokens - shared) // 4]
    own.append(tokens - shared - sum(own))
    lengths = [shared + one for one in own]
    layout = Layout.of(lengths, torch.device("cpu"), [Family(len(own), shared)])
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (1, tokens)))
    targets = ids.roll(-1, 1)
    size = tokens // world.size
    mine = slice(world.rank * size, (world.rank + 1) * size)
    world.barrier("the beginning")
    before, began = _peak(), time.monotonic()
    states = model.base_model(
        input_ids=ids[:, mine],
        position_ids=layout.positions[:, mine],
        packed_layout=layout,
        use_cache=False,
    ).last_hidden_state
    logprobs = torch.log_softmax(model.lm_head(states[0]), -1)
    loss = -logprobs.gather(-1, targets[0, mine, None]).sum()
    loss.backward()
    world.barrier("the end")
    return {
        "seconds": time.monotonic() - began,
        "megabytes": (_peak() - before) / 2**20,
        "sent": _Exchange.sent / 2**20,
        "gradients": [one.grad for one in model.parameters()],
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _in_a_process(folder: Path, rank: int, size: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    world = join(
        folder / f"meeting-{size}", rank, size, on_gpu=False, join_seconds=300, seconds=600
    )
    found = measure(world, options.tokens, options.layers, options.hidden)
    gradients = found.pop("gradients")
    if world.size > 1:
        for one in gradients:
            dist.all_reduce(one)
    if world.leads:
        torch.save(gradients, folder / f"{size}.pt")
        (folder / f"{size}.json").write_text(json.dumps(found))
        print(f"{size} ranks: " + ", ".join(f"{key} {value:.1f}" for key, value in found.items()))
    world.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    add_smoke(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.tokens //= 4
    if options.smoke:
        options.tokens, options.layers, options.hidden = 64, 1, 64
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, options.ranks):
            children = []
            for rank in range(size):
                child = os.fork()
                if not child:
                    try:
                        _in_a_process(Path(folder), rank, size, options)
                        os._exit(0)
                    finally:  # nothing of the parent's goes on here
                        os._exit(1)
                children.append(child)
            if any(os.waitpid(child, 0)[1] for child in children):
                raise SystemExit(f"one of {size} ranks failed")
        want, got = (
            torch.load(Path(folder) / f"{size}.pt", weights_only=True)
            for size in (1, options.ranks)
        )
        one, several = (
            json.loads((Path(folder) / f"{size}.json").read_text()) for size in (1, options.ranks)
        )
    off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
    print(f"largest difference of the gradients, relative: {off:.1e}")
    if options.json:
        raw = {"one": one, "several": several, "ranks": options.ranks, "tokens": options.tokens}
        ratios = {
            "gradients_off": off,
            "seconds_several_vs_one": several["seconds"] / one["seconds"],
        }
        write_json(options.json, "context_parallel", raw, ratios, smoke=options.smoke)


if __name__ == "__main__":
    main()
