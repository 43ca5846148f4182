"""Torch, vLLM and SGLang behind the same protocol, with the same models, in one table.

    python -m benchmarks.engines [--quick] [--engine torch,vllm,sglang] [--json FILE]

One engine runs at a time, on one thread, float32. Two random models: one of 4.2M parameters, and
one so small that it takes no time, with which the host is all there is. Medians of rounds, after
one that is thrown away:

    ready_s                        from nothing to the first request
    plain_tokens_per_s             16 rows, nothing drafted
    drafted_tokens_per_s           the same seeds again, with drafts from the cache: all that is
                                   drafted can be accepted, so this is the most that drafts bring.
                                   How much is drafted is each engine's own decision
    pause_ms, resume_ms            while all rows generate
    stage_ms, install_ms           new weights, while all rows generate; without the first version
    score_latency_ms               of one text of 96 tokens
    scored_tokens_per_s            16 such texts at once
    cpu_us_per_row_step            CPU time of all processes for a token
    client_us_per_row_step         of it, the generator's event loop

Ratios are over the torch engine's number. An engine that cannot run here is listed as MISSING.
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import AutoModelForCausalLM

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.errors import EngineError
from asyncrl.engine.factory import create_engine
from asyncrl.engine.protocol import Engine, GenerateRequest, SamplingParams, ScoreRequest
from asyncrl.engine.sglang.config import SglangConfig
from asyncrl.engine.vllm.config import VllmConfig
from asyncrl.wire.weights.layout import SHARED_MEMORY
from asyncrl.wire.weights.writer import WeightPublisher
from benchmarks.harness import cpu_seconds as cpu_seconds_of
from benchmarks.harness import descendants, names_of, parser_of, pick, report, sglang_python, table
from benchmarks.tiny_models import random_qwen3
from benchmarks.weights import make_model


def cpu_seconds() -> float:
    """User and system time of this process and of all living ones that it has started."""
    return time.process_time() + sum(map(cpu_seconds_of, descendants(os.getpid())))


PROMPT = 16
TOP_K = 8
_VOCABULARY = 64
"""Prompts and scored texts have token ids below it."""


@dataclass(frozen=True)
class Sizes:
    rows: int = 16
    """Requests at a time."""
    length: int = 96
    """Tokens of a response."""
    rounds: int = 3
    """Of which the median is taken, after one that is thrown away."""


def config_of(kind: str, sizes: Sizes) -> EngineConfig:
    """The same for all engines, as far as they have the same settings."""
    sglang = SglangConfig(kv_cache_gib=0.5)
    if kind == "sglang":
        sglang = SglangConfig(kv_cache_gib=0.5, python=sglang_python())
    return EngineConfig.model_validate(
        {
            "kind": kind,
            "slots": sizes.rows,
            "max_model_len": PROMPT + 8 * sizes.length,
            "threads": 1,
            "dtype": "float32",
            "top_k_logprobs": TOP_K,
            "vllm": VllmConfig(kv_cache_gib=0.5),
            "sglang": sglang,
        }
    )


async def measure(kind: str, path: str, tensors: dict[str, Any], sizes: Sizes) -> dict[str, float]:
    """Start an engine, measure everything, and close it."""
    engine = create_engine(config_of(kind, sizes), path, cache_config=CacheConfig(), seed=1)
    began = time.perf_counter()
    try:
        await engine.start()
        found = {"ready_s": time.perf_counter() - began}
        found |= await _generation(engine, sizes)
        found |= await _scores(engine, sizes)
        found |= await _updates(engine, tensors, sizes)
    finally:
        await engine.close()
    return found


def _request(name: str, row: int, length: int, *, cache_key: str = "") -> GenerateRequest:
    prompt = (7 * row + 3 * np.arange(PROMPT, dtype=np.int32)) % _VOCABULARY
    sampling = SamplingParams(length, top_k_logprobs=TOP_K, seed=row)
    return GenerateRequest(name, cache_key, prompt, sampling)


async def _round(engine: Engine, name: str, sizes: Sizes, *, cached: bool) -> dict[str, float]:
    """All rows at once. The event loop runs nothing else."""

    async def one(row: int) -> None:
        key = f"p{row}" if cached else ""
        request = _request(f"{name}.{row}", row, sizes.length, cache_key=key)
        got = [len(chunk.tokens) async for chunk in engine.generate(request)]
        assert sum(got) == sizes.length

    accepted, cpu, client = engine.stats().tokens.accepted, cpu_seconds(), time.thread_time()
    began = time.perf_counter()
    await asyncio.gather(*map(one, range(sizes.rows)))
    seconds, tokens = time.perf_counter() - began, sizes.rows * sizes.length
    return {
        "tokens_per_s": tokens / seconds,
        "cpu_us": 1e6 * (cpu_seconds() - cpu) / tokens,
        "client_us": 1e6 * (time.thread_time() - client) / tokens,
        "accepted": (engine.stats().tokens.accepted - accepted) / tokens,
    }


async def _generation(engine: Engine, sizes: Sizes) -> dict[str, float]:
    """Plain, and with drafts of what the same seeds drew before: all of them can be accepted."""
    plain = [await _round(engine, f"a{i}", sizes, cached=False) for i in range(sizes.rounds + 1)]
    drafted = [await _round(engine, f"b{i}", sizes, cached=True) for i in range(sizes.rounds + 1)]

    def median(rounds: list[dict[str, float]], name: str) -> float:
        return statistics.median(one[name] for one in rounds[1:])

    return {
        "plain_tokens_per_s": median(plain, "tokens_per_s"),
        "drafted_tokens_per_s": median(drafted, "tokens_per_s"),
        "drafts_accepted_share": median(drafted, "accepted"),
        "cpu_us_per_row_step": median(plain, "cpu_us"),
        "client_us_per_row_step": median(plain, "client_us"),
    }


async def _scores(engine: Engine, sizes: Sizes) -> dict[str, float]:
    """Scores of one text, and of all rows at once."""
    rng = np.random.default_rng(0)

    async def scored(name: str, rows: int) -> None:
        requests = []
        for row in range(rows):
            request = _request(f"{name}.{row}", row, sizes.length)
            text = rng.integers(0, _VOCABULARY, sizes.length).astype(np.int32)
            requests.append(
                ScoreRequest(request.request_id, request.prompt_tokens, text, request.sampling)
            )
        scores = await engine.score(requests)
        assert all(len(score.logprobs) == sizes.length for score in scores)

    async def rounds(rows: int) -> list[float]:
        return [await _seconds(scored, f"s{rows}.{i}", rows) for i in range(sizes.rounds + 1)][1:]

    one, many = await rounds(1), await rounds(sizes.rows)
    return {
        "score_latency_ms": 1e3 * statistics.median(one),
        "scored_tokens_per_s": sizes.rows * sizes.length / statistics.median(many),
    }


async def _updates(engine: Engine, tensors: dict[str, Any], sizes: Sizes) -> dict[str, float]:
    """Pauses, and new weights, while all rows generate."""
    times: dict[str, list[float]] = {"pause": [], "resume": [], "stage": [], "install": []}
    publisher = WeightPublisher(SHARED_MEMORY, f"bench-engines-{id(engine):x}")
    try:
        async with _generating(engine, sizes):
            for version in range(1, sizes.rounds + 2):  # the first one proves that copying will do
                times["pause"].append(await _seconds(engine.pause))
                times["resume"].append(await _seconds(engine.resume))
                manifest = publisher.publish(tensors.items(), version)
                times["stage"].append(await _seconds(engine.stage_weights, manifest))
                times["install"].append(await _seconds(engine.install_weights, version))
    finally:
        publisher.close()
    return {f"{name}_ms": 1e3 * statistics.median(one[1:]) for name, one in times.items()}


@asynccontextmanager
async def _generating(engine: Engine, sizes: Sizes) -> AsyncIterator[None]:
    """All rows generate one response after the other inside the block."""
    first = asyncio.Event()

    async def row_of(row: int) -> None:
        count = 0
        while True:
            count += 1
            async for _ in engine.generate(_request(f"u{count}.{row}", row, 8 * sizes.length)):
                first.set()

    rows = [asyncio.create_task(row_of(row)) for row in range(sizes.rows)]
    try:
        await first.wait()
        yield
    finally:
        for task in rows:
            task.cancel()
        await asyncio.gather(*rows, return_exceptions=True)


async def _seconds(call: Callable[..., Awaitable[Any]], *arguments: Any) -> float:
    began = time.perf_counter()
    await call(*arguments)
    return time.perf_counter() - began


KINDS = ("torch", "vllm", "sglang")
MODELS = ("4M", "host")
Found = dict[str, dict[str, dict[str, float]]]
"""Numbers by engine and model."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "3 rounds, not 9")
    parser.add_argument("--engine", default=",".join(KINDS), help="some of them, with commas")
    options = parser.parse_args(arguments)
    kinds = names_of(parser, options.engine, KINDS)
    torch.set_num_threads(1)
    sizes = pick(options, Sizes(rounds=9), Sizes(rounds=3), Sizes(rows=2, length=8, rounds=1))
    names = MODELS[1:] if options.smoke else MODELS
    found, missing = _measure_all(kinds, sizes, names)
    for kind, why in missing.items():
        print(f"MISSING: {kind} was not measured: {why}", file=sys.stderr)
    shown = [table_of(found, model) for model in names]
    report(options, "engines", {"engines": found, "missing": missing}, ratios_of(found), *shown)
    return 0


def _measure_all(
    kinds: Sequence[str], sizes: Sizes, names: Sequence[str]
) -> tuple[Found, dict[str, str]]:
    """One engine and one model after the other; and why engines are missing."""
    found: Found = {}
    missing: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        models = _make_models(Path(folder), 2 * (16 + 8 * sizes.length), names)
        for kind in kinds:
            try:
                of_kind = {
                    name: asyncio.run(measure(kind, path, tensors, sizes))
                    for name, (path, tensors) in models.items()
                }
            except (EngineError, ImportError) as error:
                missing[kind] = str(error)
            else:
                found[kind] = of_kind
    return found, missing


def _make_models(
    folder: Path, max_length: int, names: Sequence[str]
) -> dict[str, tuple[str, dict[str, Any]]]:
    """The directory and the weights of each model."""
    models = {}
    for name in names:
        if name == "host":
            random_qwen3(1, 64, max_length=max_length).save_pretrained(folder / name)
        else:
            make_model(folder / name, hidden=256, layers=4)
        path = str(folder / name)
        models[name] = path, dict(AutoModelForCausalLM.from_pretrained(path).state_dict())
    return models


def ratios_of(found: Found) -> dict[str, float]:
    """Each number over the torch engine's, where that is not 0."""
    if "torch" not in found:
        return {}
    return {
        f"{kind}_vs_torch_{model}_{name}": value / base
        for kind, models in found.items()
        if kind != "torch"
        for model, numbers in models.items()
        for name, value in numbers.items()
        if (base := found["torch"][model][name])
    }


def table_of(found: Found, model: str) -> Table:
    """A row for each number, a column for each engine."""
    names = next((list(models[model]) for models in found.values()), [])
    rows = ((name, *(models[model][name] for models in found.values())) for name in names)
    return table(f"engines, model {model}", ("number", *found), rows)
