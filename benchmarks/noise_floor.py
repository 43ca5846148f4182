"""What verification rejects under unchanged weights, by engine, data type, K and model.

    python -m benchmarks.noise_floor [--engine torch|vllm] [--quick] [--json FILE]

Every response is verified again under the weights that drew it, as a run does with one in 64
(`asyncrl.generator.noise_floor`). Two models: the built-in one, which is sure of most of
its tokens, and a random one over 5,000 tokens, nearly flat, so that nearly all of its tokens lie
outside the K most probable ones. Next to the measured share is what the simulator's model says from
the difference of the log-probabilities alone (docs/modes.md).
"""

import asyncio
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec

from asyncrl.gpu_check.generating import Case, measure
from asyncrl.tasks.model import default_cache_dir, ensure_builtin_model
from benchmarks.harness import parser_of, pick, report, table
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "a quarter of the responses")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch")
    options = parser.parse_args(arguments)
    responses, length = pick(options, (192, 128), (48, 128), (4, 8))
    dtypes, ks = (DTYPES[:1], KS[:1]) if options.smoke else (DTYPES, KS)
    raw: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    rows = []
    with TemporaryDirectory(prefix="asyncrl-noise-floor-") as folder:
        made = models(Path(folder), smoke=options.smoke)
        for name, dtype, top_k in itertools.product(made, dtypes, ks):
            case = Case(name, options.engine, dtype, top_k, responses, length)
            found = asyncio.run(measure(case, made[name]))
            share, judged = found.measured.share or 0.0, found.measured
            ratios[f"{name}_{dtype}_k{top_k}"] = share
            raw.append({"case": msgspec.to_builtins(case), "found": msgspec.to_builtins(found)})
            nats = f"{judged.abs_mean or 0:.1e}"
            shares = (f"{share:.2%}", f"{found.model:.2%}")
            rows.append((name, dtype, top_k, f"{found.outside:.1%}", judged.judged, nats, *shares))
    shown = table(
        f"tokens that {options.engine} rejects under unchanged weights",
        "model,dtype,K,outside,judged,nats,rejected,model says",
        rows,
    )
    report(options, "noise_floor", {"cases": raw}, ratios, shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
