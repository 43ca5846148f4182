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

Most imports are inside `main`, see `benchmarks.exactness.main`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.engines.measure import Sizes

KINDS = ("torch", "vllm", "sglang")
MODELS = ("4M", "host")
Found = dict[str, dict[str, dict[str, float]]]
"""Numbers by engine and model."""


def main(arguments: Sequence[str] | None = None) -> int:
    import torch
    from rich.console import Console

    from benchmarks.engines.measure import Sizes
    from benchmarks.report import add_smoke, write_json

    parser = argparse.ArgumentParser(description="torch, vLLM and SGLang side by side")
    parser.add_argument("--quick", action="store_true", help="3 rounds, not 9")
    parser.add_argument("--engine", default=",".join(KINDS), help="some of them, with commas")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here")
    add_smoke(parser)
    options = parser.parse_args(arguments)
    kinds = options.engine.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"--engine {options.engine}: some of {', '.join(KINDS)}")
    torch.set_num_threads(1)
    sizes, names = Sizes(rounds=3 if options.quick else 9), MODELS
    if options.smoke:
        sizes, names = Sizes(rows=2, length=8, rounds=1), MODELS[1:]
    found, missing = _measure_all(kinds, sizes, names)
    ratios = ratios_of(found)
    console = Console(width=None if sys.stdout.isatty() else 150)
    for model in names:
        console.print(table_of(found, model))
    for kind, why in missing.items():
        print(f"MISSING: {kind} was not measured: {why}", file=sys.stderr)
    if options.json:
        write_json(
            options.json,
            "engines",
            {"engines": found, "missing": missing},
            ratios,
            smoke=options.smoke,
        )
    return 0


def _measure_all(
    kinds: Sequence[str], sizes: Sizes, names: Sequence[str]
) -> tuple[Found, dict[str, str]]:
    """One engine and one model after the other; and why engines are missing."""
    from asyncrl.engine.errors import EngineError
    from benchmarks.engines.measure import measure

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
    from transformers import AutoModelForCausalLM

    from benchmarks.vllm_host.models import tiny_model
    from benchmarks.weights import make_model

    models = {}
    for name in names:
        if name == "host":
            tiny_model(folder / name, max_length)
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


def table_of(found: Found, model: str) -> Any:
    """The printed table of a model: a row for each number, a column for each engine."""
    from rich.table import Table

    table = Table(title=f"engines, model {model} (in brackets: over torch)")
    table.add_column("")
    for kind in found:
        table.add_column(kind, justify="right")
    ratios = ratios_of(found)
    names = next((list(models[model]) for models in found.values()), [])
    for name in names:
        cells = []
        for kind, models in found.items():
            ratio = ratios.get(f"{kind}_vs_torch_{model}_{name}")
            share = "" if ratio is None else f" ({ratio:.2f})"
            cells.append(f"{models[model][name]:,.4g}{share}")
        table.add_row(name, *cells)
    return table
