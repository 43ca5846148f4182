"""What does the generator cost vLLM: the log-probabilities, and the Python on the host?

    python -m benchmarks.vllm_host [--quick] [--part topk|host] [--json FILE]

Two real vLLM engines run in turns on the same prompts: `ours`, the generator (`VllmEngine` and
`SampleGenerator`) down to finished trajectories, and `plain`, vLLM with the same arguments and none
of our code: its own sampler and scheduler, no log-probabilities, no drafter, and an output
processor that throws everything away except the end of a request.

**vllm_topk_overhead** is tokens/s of ours over tokens/s of plain, the median over pairs of rounds:
64 rows, K = 64, a random model with a vocabulary of 32,000 (43 M parameters), no drafts.
`vllm_topk_over_none` is ours at K = 64 over ours at K = 0.

**host_us_per_row_step** is the CPU time of our code in µs per generated token, with 256 rows and a
model so small that the host is all there is (K = 8): `client`, the generator's event loop, ours
less plain (it may be negative: plain decodes more outputs); `sampler`, ours around the draw;
`drafter` and `table`, our hooks in vLLM's core. **host_core_us_per_row_step** is the sum without
the client: it delays the next step. The draw is arithmetic that a GPU does, and is printed only.
What a request costs is spread over its tokens. Not counted: the thread that encodes a step's
message, and reward workers.
"""

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from asyncrl.cache.config import CacheConfig
from benchmarks.harness import parser_of, pick, report, table
from benchmarks.tiny_models import qwen3, random_qwen3
from benchmarks.vllm_host.clocks import DRAW
from benchmarks.vllm_host.sides import PROMPT, Ours, Plain, Side, Spent, config_of, timed

VOCABULARY = 32_000


def wide_model(path: Path, max_length: int) -> None:
    """A model with a real vocabulary: 43 M parameters, of which the head has 16 M.

    The scale of its embeddings gives the 64 most probable tokens most of the mass, as in a language
    model: how many tokens are drawn from outside them decides what a draw costs.
    """
    model = qwen3(VOCABULARY, 512, 8, seed=2, max_position_embeddings=max_length)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0.0, 0.25)
    model.save_pretrained(path)


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
    tiny = random_qwen3(1, 64, max_length=PROMPT + tokens + 1)
    tiny.save_pretrained(folder / "tiny")
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
    labels = {"ours": f"ours, K = {k}", "none": "ours, K = 0", "plain": "plain"}
    return table(
        f"{k} log-probabilities a token",
        "side,tokens/s (median),ours / it",
        (
            (
                label,
                statistics.median(s.row_steps / s.wall for s in rounds[name]),
                speed_ratio(rounds["ours"], rounds[name]),
            )
            for name, label in labels.items()
        ),
    )


def host_table(costs: dict[str, float], rounds: dict[str, list[Spent]]) -> Table:
    """CPU time of our code by part, and of each side as a whole."""
    rows: list[tuple[str, float]] = list(costs.items())
    for name, each in rounds.items():
        for what, of in (
            ("client", lambda s: s.client),
            ("core", lambda s: s.core),
            ("draw", lambda s: s.hooks[DRAW]),
        ):
            median = statistics.median(of(s) / s.row_steps for s in each)
            rows.append((f"{name}: all of the {what}", 1e6 * median))
    return table("our code on the host", "part,µs per row-step", rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "some minutes")
    parser.add_argument("--part", choices=("topk", "host"), help="only this one")
    options = parser.parse_args(arguments)
    effort = pick(options, FULL, QUICK, SMOKE)
    raw: dict[str, Any] = {"effort": effort._asdict()}
    ratios: dict[str, float] = {}
    shown = []
    with tempfile.TemporaryDirectory() as folder:
        if options.part != "host":
            topk = asyncio.run(measure_topk(effort, Path(folder)))
            raw["topk"] = {name: [asdict(one) for one in each] for name, each in topk.items()}
            ratios["vllm_topk_overhead"] = speed_ratio(topk["ours"], topk["plain"])
            ratios["vllm_topk_over_none"] = speed_ratio(topk["ours"], topk["none"])
            shown.append(topk_table(topk, effort.top_k))
        if options.part != "topk":
            host = asyncio.run(measure_host(effort, Path(folder)))
            costs = host_costs(host["ours"], host["plain"])
            raw["host"] = {name: [asdict(one) for one in each] for name, each in host.items()}
            raw["host_us_by_part"] = costs
            ratios["host_us_per_row_step"] = sum(costs.values())
            ratios["host_core_us_per_row_step"] = in_core(costs)
            shown.append(host_table(costs, host))
    report(options, "vllm_host", raw, ratios, *shown)
    return 0
