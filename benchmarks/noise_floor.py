"""What verification rejects under unchanged weights, by engine, data type, K and model.

    python -m benchmarks.noise_floor [--engine torch|vllm] [--quick] [--json FILE]

Every response is verified again under the weights that drew it, as a run does with one in 64
(`asyncrl.generator.noise_floor`). Two models: the built-in one, which is sure of most of
its tokens, and a random one over 5,000 tokens, nearly flat, so that nearly all of its tokens lie
outside the K most probable ones. Next to the measured share is what the simulator's model says from
the difference of the log-probabilities alone (docs/modes.md).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from asyncrl.gpu_check.generating import Case, measure
from asyncrl.tasks.model import default_cache_dir, ensure_builtin_model
from benchmarks.report import add_smoke, write_json
from benchmarks.tiny_models import SMOKE_START, random_qwen3

VOCABULARY = 5000
"""Of the flat model."""
DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
KS = (8, 64)


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
