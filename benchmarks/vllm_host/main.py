"""What the generator costs vLLM: the log-probabilities, and the Python on the host.

    python -m benchmarks.vllm_host [--quick] [--json FILE]

Each part runs two real vLLM engines in turns, in one process and on the same prompts:

    ours    the generator: `VllmEngine` and `SampleGenerator`, down to finished trajectories
    plain   vLLM with the same arguments and without any of our code: its own sampler, no
            log-probabilities, no drafter, its own scheduler, and an output processor that throws
            everything away except the end of a request

**vllm_topk_overhead** is tokens/s of ours over tokens/s of plain, the median over pairs of rounds:
64 rows, K = 64, a random model with a vocabulary of 32,000 (43 M parameters), no drafts. It
compares all that ours does, the draw and the transport included, with a vLLM that reports nothing.
`vllm_topk_over_none` is ours at K = 64 over ours at K = 0.

**host_us_per_row_step** is the CPU time of our code, in microseconds per generated token, with 256
rows and a model so small that the host is all there is (K = 8). The drafter is on and keeps its
books. A full step has no room for drafts; at the end of a round, where rows have ended, steps have,
and what the planner then drafts is counted. It is the sum of

    client          CPU time of the generator's event loop, ours less plain: steps, chunks, samples,
                    trajectories, requests, and vLLM's own decoding of our tables. Plain decodes an
                    output per request, which ours does not send: what that saves counts too
    sampler         CPU time of our sampler around the draw: rows, random numbers, output
    drafter, table  CPU time of our hooks in vLLM's core: before a step, after it, and the
                    scheduler's table

**host_core_us_per_row_step** is the sum without the client. It delays the next step. The client is
another process, whose work overlaps with the model's where they do not share a processor. Its part
may be negative: plain vLLM sends and decodes more.

The draw itself (`draw`: from logits to tokens and lists) is arithmetic that a GPU does. It is part
of vllm_topk_overhead, and printed next to vLLM's own sampler here.

Requests begin and end in a round, so what a request costs is spread over its tokens. Not counted:
the thread that encodes a step's message (one more array or two), and reward workers. The CPU time
of the whole core process is in the raw numbers; its difference is smaller than its noise.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from asyncrl.cache.config import CacheConfig
from benchmarks.harness import parser_of, write_json
from benchmarks.vllm_host.clocks import DRAW
from benchmarks.vllm_host.models import tiny_model, wide_model
from benchmarks.vllm_host.sides import PROMPT, Ours, Plain, Side, Spent, config_of, timed


class Effort(NamedTuple):
    rounds: int
    topk_tokens: int
    host_tokens: int
    """Of each response."""
    topk_rows: int = 64
    top_k: int = 64
    host_rows: int = 256


QUICK, FULL = Effort(3, 96, 512), Effort(8, 256, 1024)
SMOKE = Effort(1, 8, 8, topk_rows=4, host_rows=4)
HOST_K = 8


async def measure_topk(effort: Effort, folder: Path) -> dict[str, list[Spent]]:
    """Rounds of ours at K, ours at 0 and plain, in turns."""
    rows, tokens, k = effort.topk_rows, effort.topk_tokens, effort.top_k
    config = config_of(rows, tokens, k)
    wide_model(folder / "wide", PROMPT + tokens + 1)
    path = str(folder / "wide")
    rounds: dict[str, list[Spent]] = {"ours": [], "none": [], "plain": []}
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(
            Ours.running(config, path, CacheConfig(enabled=False))
        )
        plain = await stack.enter_async_context(Plain.running(config, path))
        for side, top_k in ((ours, k), (ours, 0), (plain, 0)):
            await timed(side, rows, min(16, tokens), top_k)
        for _ in range(effort.rounds):
            rounds["ours"].append(await timed(ours, rows, tokens, k))
            rounds["plain"].append(await timed(plain, rows, tokens, 0))
            rounds["none"].append(await timed(ours, rows, tokens, 0))
    return rounds


async def measure_host(effort: Effort, folder: Path) -> dict[str, list[Spent]]:
    """Rounds of ours and plain, in turns."""
    rows, tokens = effort.host_rows, effort.host_tokens
    # Steps of as many tokens as there are rows: none is left for drafts.
    config = config_of(rows, tokens, HOST_K, max_prefill_tokens=rows)
    tiny_model(folder / "tiny", PROMPT + tokens + 1)
    path = str(folder / "tiny")
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(Ours.running(config, path, CacheConfig()))
        plain = await stack.enter_async_context(Plain.running(config, path))
        return await host_rounds(effort, ours, plain, HOST_K)


async def host_rounds(
    effort: Effort, ours: Side, plain: Side, top_k: int
) -> dict[str, list[Spent]]:
    """Rounds of two engines that run; `top_k` is that of ours."""
    rows, tokens = effort.host_rows, effort.host_tokens
    rounds: dict[str, list[Spent]] = {"ours": [], "plain": []}
    await timed(ours, rows, min(64, tokens), top_k)
    await timed(plain, rows, min(64, tokens), 0)
    for _ in range(effort.rounds):
        rounds["ours"].append(await timed(ours, rows, tokens, top_k))
        rounds["plain"].append(await timed(plain, rows, tokens, 0))
    return rounds


def speed_ratio(ours: list[Spent], others: list[Spent]) -> float:
    """Median over pairs of rounds of tokens/s of the one over tokens/s of the other."""
    return statistics.median(
        (a.row_steps / a.wall) / (b.row_steps / b.wall) for a, b in zip(ours, others, strict=True)
    )


def host_costs(ours: list[Spent], plain: list[Spent]) -> dict[str, float]:
    """Microseconds per row-step by part, medians over the rounds."""

    def median(parts: list[float]) -> float:
        return statistics.median(parts)

    costs = {
        "client": median([s.client / s.row_steps for s in ours])
        - median([s.client / s.row_steps for s in plain])
    }
    for name in ours[0].hooks:
        if name != DRAW:
            costs[name] = median([s.hooks[name] / s.row_steps for s in ours])
    return {name: 1e6 * seconds for name, seconds in costs.items()}


def in_core(costs: dict[str, float]) -> float:
    """The part of our code's cost that delays the next step; the client runs meanwhile."""
    return sum(cost for name, cost in costs.items() if name != "client")


def topk_table(rounds: dict[str, list[Spent]], k: int) -> Table:
    table = Table("side", "tokens/s (median)", "ours / it", title=f"{k} log-probabilities a token")
    for name, label in (("ours", f"ours, K = {k}"), ("none", "ours, K = 0"), ("plain", "plain")):
        speed = statistics.median(s.row_steps / s.wall for s in rounds[name])
        table.add_row(label, f"{speed:,.0f}", f"{speed_ratio(rounds['ours'], rounds[name]):.3f}")
    return table


def host_table(costs: dict[str, float], rounds: dict[str, list[Spent]]) -> Table:
    """CPU time of our code by part."""
    table = Table("part", "µs per row-step", title="our code on the host")
    for name, cost in costs.items():
        table.add_row(name, f"{cost:.2f}")
    table.add_row("together", f"{sum(costs.values()):.2f}")
    table.add_row("of that in vLLM's core", f"{in_core(costs):.2f}")
    for name, each in rounds.items():
        client = statistics.median(s.client / s.row_steps for s in each) * 1e6
        core = statistics.median(s.core / s.row_steps for s in each) * 1e6
        draw = statistics.median(s.hooks[DRAW] / s.row_steps for s in each) * 1e6
        table.add_row(
            f"[dim]{name}: all of the client, of the core, the draw[/]",
            f"[dim]{client:.2f}, {core:.2f}, {draw:.2f}[/]",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, "some minutes")
    parser.add_argument("--part", choices=("topk", "host"), help="only this one")
    options = parser.parse_args(arguments)
    effort, console = (SMOKE if options.smoke else QUICK if options.quick else FULL), Console()
    raw: dict[str, Any] = {"effort": effort._asdict()}
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.part != "host":
            topk = asyncio.run(measure_topk(effort, Path(folder)))
            raw["topk"] = {name: [asdict(one) for one in each] for name, each in topk.items()}
            ratios["vllm_topk_overhead"] = speed_ratio(topk["ours"], topk["plain"])
            ratios["vllm_topk_over_none"] = speed_ratio(topk["ours"], topk["none"])
            console.print(topk_table(topk, effort.top_k))
        if options.part != "topk":
            host = asyncio.run(measure_host(effort, Path(folder)))
            costs = host_costs(host["ours"], host["plain"])
            raw["host"] = {name: [asdict(one) for one in each] for name, each in host.items()}
            raw["host_us_by_part"] = costs
            ratios["host_us_per_row_step"] = sum(costs.values())
            ratios["host_core_us_per_row_step"] = in_core(costs)
            console.print(host_table(costs, host))
    console.print({name: round(value, 3) for name, value in ratios.items()})
    if options.json:
        write_json(options.json, "vllm_host", raw, ratios, smoke=options.smoke)
