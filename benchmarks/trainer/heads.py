"""Ways from hidden states to log-probabilities and their gradients: seconds and memory.

    python -m benchmarks.trainer.heads [--tokens 4096] [--hidden 1024] [--json FILE]

Each in a process of its own, forward and backward pass, float32, the same tensors:

    block-K                `asyncrl.trainer.model.head` with blocks of 2^K logits (its own is BLOCK)
    linear_cross_entropy   torch.nn.functional.linear_cross_entropy, reduction "none", chunks of its
                           own choice; it gives no entropy, which `asyncrl.trainer.model.head` does
    all                    all logits at once, log_softmax, gather

CPU seconds say more than seconds where other work runs on the machine. Memory is the most that the
process had, without what it had before the first pass. In turns: all of them, then all again.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import write_json

EXPONENTS = (20, 21, 22, 23, 24, 25, 26)
WAYS = (*(f"block-{one}" for one in EXPONENTS), "linear_cross_entropy", "all")
_SECONDS = 900.0
"""Longest time of one process."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options)))
        return
    found: dict[str, list[dict[str, Any]]] = {one: [] for one in options.ways}
    for _ in range(options.turns):
        for way in options.ways:
            if (result := run_child(way)) is not None:
                found[way].append(result)
    print(
        f"{options.tokens:,} tokens, {options.hidden:,} numbers, {options.vocabulary:,} tokens of "
        f"vocabulary, {options.threads} threads"
    )
    ratios: dict[str, float] = {}
    for way, results in found.items():
        if results:
            cpu, seconds, peak = (
                statistics.median(one[key] for one in results) for key in ("cpu", "seconds", "peak")
            )
            ratios[f"cpu_seconds_{way}"] = cpu
            print(f"  {way:22} {cpu:7.2f} CPU s  {seconds:7.2f} s  {peak / 2**20:7,.0f} MiB")
    if options.json:
        write_json(options.json, "trainer-heads", found, ratios)


def run_child(way: str) -> dict[str, Any] | None:
    """What `measure` gives, from a process of its own; None if it failed, which is said."""
    command = [sys.executable, "-m", "benchmarks.trainer.heads", *sys.argv[1:], "--child", way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        print(f"{way} failed ({done.returncode}): {done.stderr[-300:]}")
        return None
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """The second and third of three passes, the faster one; and bytes beyond the start's."""
    from asyncrl.trainer.cpu.layers import speed_up
    from asyncrl.trainer.cpu.memory import keep_freed_memory

    keep_freed_memory()  # as a run's trainer does on a CPU
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    layer = nn.Linear(options.hidden, options.vocabulary, bias=False)
    layer.weight.grad = torch.zeros_like(layer.weight)  # the step's sum, there in any case
    speed_up(layer)
    hidden = torch.randn(options.tokens, options.hidden).requires_grad_()
    targets = torch.randint(0, options.vocabulary, (options.tokens,))
    logprobs = _way(way, layer, hidden, targets)
    before, taken = _peak(), []
    for _ in range(3):
        cpu, wall = time.process_time(), time.perf_counter()
        values = logprobs()
        (values * torch.linspace(-1, 1, options.tokens)).sum().backward()
        taken.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu, seconds = min(taken[1:])
    return {"cpu": cpu, "seconds": seconds, "peak": _peak() - before}


def _way(way: str, layer: nn.Linear, hidden: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    from asyncrl.trainer.model import head

    plain = head.Processing(head.LogitMap())
    if way == "all":
        return lambda: head.process(layer(hidden), targets, plain).logprobs
    if way == "linear_cross_entropy":
        options = nn.LinearCrossEntropyOptions()
        return lambda: (
            -torch.nn.functional.linear_cross_entropy(
                hidden, layer.weight, targets, reduction="none", options=options
            )
        )
    head.BLOCK["cpu"] = 1 << int(way.removeprefix("block-"))
    return lambda: head.score_tokens(layer, hidden, targets, plain).logprobs


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
