"""Rollouts of successive policy versions: our engines against the alternatives of a user.

    python -m benchmarks.rollout [--quick] [--json FILE]

    policies  versions of one model trained by this project (`benchmarks.policies`); epoch 1 is
              generated under the earlier one of `--versions`, epoch 2 is timed under the later one
    cost      both are widened to 101M parameters (`benchmarks.widen`): a step reads 404 MB of
              weights, so decoding is bound by memory as on a GPU
    vllm      plain · its own `suffix` drafter · ours         (how: `benchmarks.rollout.passes`)
    torch     plain · chains · trees
    sglang    plain · its own NGRAM, on a GPU · ours
    trees     accepted tokens per forward, one node budget    (`benchmarks.rollout.trees`)
    verify    tokens kept one optimizer step later            (`benchmarks.rollout.kept`)
    floor     bytes and operations of this machine            (`benchmarks.rollout.floor`)

The last table compares each target with the result. The first run also trains the policies, which
takes some minutes; they are stored in the cache directory.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KINDS = ("vllm", "torch", "sglang")
DEFAULT = ["vllm", "torch"]
WIDE = 684 * 128
"""Intermediate size that gives the trained model 101 million parameters."""
SPARE_PROMPTS = 512
"""Prompts beyond those trained on, for large batches."""
EPOCH = (0, 16)
"""Policy versions of epochs 1 and 2: one epoch of training apart."""


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no engine {unknown[0]!r}; the engines are {', '.join(KINDS)}"
        )
    return kinds


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers like 1,8,32")
    return numbers


def _versions(text: str) -> tuple[int, int]:
    from benchmarks.policies import Recipe

    kept = Recipe().keep
    pair = tuple(int(part) if part.isdigit() else -1 for part in text.split(","))
    if len(pair) != 2 or pair[0] not in kept or pair[1] not in kept or pair[0] > pair[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a pair EARLIER,LATER of {kept}")
    return pair[0], pair[1]


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 6 minutes; in full under 30")
    parser.add_argument("--json", metavar="FILE", help="write machine, versions, raw and ratios")
    parser.add_argument(
        "--engines",
        "--engine",
        type=_kinds,
        default=DEFAULT,
        help="of vllm, torch and sglang; default: vllm,torch",
    )
    parser.add_argument("--rows", type=_numbers, help="requests at a time, e.g. 1,8,32")
    parser.add_argument(
        "--versions",
        type=_versions,
        default=EPOCH,
        metavar="EARLIER,LATER",
        help="policy versions of epoch 1 and 2; default %(default)s, an epoch of training",
    )
    parser.add_argument(
        "--widened",
        type=int,
        default=WIDE,
        metavar="SIZE",
        help="intermediate_size of the model that is timed; default %(default)s",
    )
    from benchmarks.report import add_smoke

    add_smoke(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    # Imported late: see benchmarks.rollout.run.
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from asyncrl.tasks.loading import load_task
    from benchmarks.policies import SMOKE, drift_table, ensure_policies
    from benchmarks.report import write_json
    from benchmarks.rollout import floor as rollout_floor
    from benchmarks.rollout.passes import GROUP, Workload
    from benchmarks.rollout.run import Effort, Measurement
    from benchmarks.rollout.tables import tables
    from benchmarks.widen import widen

    raw: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    disable_progress_bar()
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        if options.smoke:
            options.engines, options.versions, options.widened = ["torch"], SMOKE.keep, 128
            policies, effort = ensure_policies(SMOKE, Path(folder)), Effort.of_smoke()
        else:
            policies = ensure_policies()
            effort = Effort.of(quick=options.quick, rows=options.rows)
        console.print(drift_table(policies))
        earlier, later = (policies.paths[version] for version in options.versions)
        recipe = policies.recipe
        task = load_task(recipe.task(recipe.prompts + SPARE_PROMPTS), str(earlier), 0)
        wide = [Path(folder) / side for side in ("earlier", "later")]
        for source, target in zip((earlier, later), wide, strict=True):
            raw["parameters"] = widen(str(source), target, options.widened)
        measurement = Measurement(
            options.engines,
            policies,
            Workload(task, recipe.max_tokens, wide[0], wide[1]),
            Workload(task, recipe.max_tokens, earlier, later),
            effort,
        )
        findings = measurement.run()
    shape = recipe.warm_start
    findings.machine = rollout_floor.measure(
        shape.hidden_size, options.widened, shape.layers, least=options.smoke
    )
    for table in tables(findings):
        console.print(table)
    for part, reason in findings.missing.items():
        console.print(f"[bold red]{part} was NOT measured:[/] {reason}")
    if options.json:
        raw |= {
            "versions": options.versions,
            "drift_total_variation_per_token": policies.drift,
            "mean_probability_of_own_tokens": policies.certainty,
            "accuracy": policies.accuracy,
            "intermediate_size": options.widened,
            "samples_per_prompt": GROUP,
            "device": _device(),
            "load_after": os.getloadavg()[0],
        }
        write_json(
            options.json, "rollout", raw | findings.raw(), findings.ratios(), smoke=options.smoke
        )
    return 1 if findings.failed else 0


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
