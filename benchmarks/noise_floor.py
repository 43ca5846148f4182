"""What verification rejects under unchanged weights, by engine, data type, K and model.

    python -m benchmarks.noise_floor [--engine torch|vllm] [--quick] [--json FILE]

Every response is verified again under the weights that drew it, as a run does with one in 64
(`asyncrl.processes.generator.noise_floor`). Two models: the built-in one, which is sure of most of
its tokens, and a random one over 5,000 tokens, nearly flat, so that nearly all of its tokens lie
outside the K most probable ones. Next to the measured share is what the simulator's model says from
the difference of the log-probabilities alone (docs/simulation.md).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from asyncrl.cache.config import CacheConfig
from asyncrl.engine.config import EngineConfig
from asyncrl.engine.factory import create_engine
from asyncrl.engine.protocol import Engine, GenerateRequest, SamplingParams
from asyncrl.processes.generator.background import BackgroundTasks
from asyncrl.processes.generator.noise_floor import NoiseFloorProbe
from asyncrl.rollout.trajectory import SampleId, TrajectoryBuilder, VerifiableTrajectory
from asyncrl.simulation.lengths import Survival
from asyncrl.tasks.model import default_cache_dir, ensure_builtin_model
from asyncrl.wire.noise_floor import NoiseFloor
from benchmarks.report import add_smoke, write_json
from benchmarks.tiny_models import SMOKE_START, random_qwen3

VOCABULARY = 5000
"""Of the flat model."""
DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
KS = (8, 64)


@dataclass(frozen=True)
class Case:
    """What is measured."""

    model: str
    kind: Literal["torch", "vllm"]
    dtype: Literal["float32", "bfloat16"]
    top_k: int
    responses: int
    length: int
    """Tokens of each response."""


@dataclass(frozen=True)
class Found:
    """What came out."""

    measured: NoiseFloor
    outside: float
    """Share of the tokens outside the top K."""
    model: float
    """The share that the simulator's model says is rejected."""


async def measure(case: Case, path: Path) -> Found:
    """Generate responses with an engine and verify each of them again."""
    config = EngineConfig(
        kind=case.kind, dtype=case.dtype, slots=32, max_model_len=case.length + 16,
        top_k_logprobs=case.top_k,
    )  # fmt: skip
    engine = create_engine(config, str(path), cache_config=CacheConfig(), seed=1)
    await engine.start()
    try:
        sampling = SamplingParams(max_tokens=case.length, top_k_logprobs=case.top_k)
        responses = await asyncio.gather(
            *(_response(engine, sampling, index) for index in range(case.responses))
        )
        probe, tasks = NoiseFloorProbe(engine, sampling, every=1), BackgroundTasks()
        for response in responses:
            probe.consider(response, tasks)
            await probe.idle()
        tasks.raise_failure()
    finally:
        await engine.close()
    listed = [(one.topk_ids == one.tokens[:, None]).any(axis=1).mean() for one in responses]
    outside = 1.0 - float(np.mean(listed))
    noise = (probe.measured.abs_mean or 0.0) / 2
    model = Survival("block", decisive=1.0, outside=outside, noise=noise)
    return Found(probe.measured, outside, 1.0 - model.expected([case.length], 0.0))


async def _response(engine: Engine, sampling: SamplingParams, index: int) -> VerifiableTrajectory:
    prompt = np.array([1 + index % 8, 2, 3], np.int32)
    builder = TrajectoryBuilder(SampleId(index, 0), f"prompt {index % 8}", prompt)
    own = replace(sampling, seed=index)
    async for chunk in engine.generate(
        GenerateRequest(f"r{index}", builder.prompt_id, prompt, own)
    ):
        chunk.append_to(builder)
    return builder.finish("length")


def models(folder: Path, *, smoke: bool) -> dict[str, Path]:
    """The directories of both models, by name; in a smoke, of the built-in one in miniature."""
    random_qwen3(1, VOCABULARY, max_length=1024).save_pretrained(folder / "flat")
    built_in = (
        ensure_builtin_model(folder, None, SMOKE_START)
        if smoke
        else ensure_builtin_model(default_cache_dir())
    )
    return {"built-in": built_in, "flat": folder / "flat"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    parser.add_argument("--quick", action="store_true", help="a quarter of the responses")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    add_smoke(parser)
    args = parser.parse_args(arguments)
    responses, length = (4, 8) if args.smoke else (48 if args.quick else 192, 128)
    table = Table(title=f"tokens that {args.engine} rejects under unchanged weights")
    for column in ("model", "dtype", "K", "outside", "judged", "nats", "rejected", "model says"):
        table.add_column(column, justify="right")
    raw: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with TemporaryDirectory(prefix="asyncrl-noise-floor-") as folder:
        for name, path in models(Path(folder), smoke=args.smoke).items():
            for dtype in DTYPES[:1] if args.smoke else DTYPES:
                for top_k in KS[:1] if args.smoke else KS:
                    case = Case(name, args.engine, dtype, top_k, responses, length)
                    found = asyncio.run(measure(case, path))
                    share = found.measured.share or 0.0
                    ratios[f"{name}_{dtype}_k{top_k}"] = share
                    raw.append(
                        {
                            "case": msgspec.to_builtins(case),
                            "found": msgspec.to_builtins(found),
                        }
                    )
                    table.add_row(
                        name, dtype, str(top_k), f"{found.outside:.1%}",
                        f"{found.measured.judged:,}", f"{found.measured.abs_mean or 0:.1e}",
                        f"{share:.2%}", f"{found.model:.2%}",
                    )  # fmt: skip
    Console(width=100).print(table)
    if args.json:
        write_json(args.json, "noise_floor", {"cases": raw}, ratios, smoke=args.smoke)


if __name__ == "__main__":
    main()
