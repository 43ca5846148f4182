"""What evaluation during training costs, at the pace of modelled devices.

    python -m benchmarks.evaluation [--quick] [--json FILE]

Each mode is run twice on the devices of `benchmarks.paced` (an H200 and a 7B model, heavy-tailed
lengths): without `evaluation.every`, and with a round of half a step's samples every fifth step, a
tenth of all samples. `slowdown` is the ratio of the step times. A tenth more samples cost about a
tenth where generators are never idle; what is beyond is due to weights that wait for held-out
samples (`held`, mean of the longest wait of each round).

--quick: verify and keep(4). In full also sync and keep(1); 3 runs of each.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.monitoring.records.metrics_log import read_evaluations
from benchmarks.harness import parser_of, pick, report, table
from benchmarks.paced.model import make_model
from benchmarks.paced.run import carry_out
from benchmarks.paced.setting import KEEP_1, KEEP_4, SYNC, VERIFY, Paced, smoke

EVERY = 5
STEPS = 23


@dataclass(frozen=True)
class Evaluated(Paced):
    """A paced run that is evaluated while it trains, or not."""

    steps: int = STEPS
    every: int | None = None

    @property
    def prompts(self) -> int:
        """Held-out prompts of a round, one sample of each."""
        return self.generators * self.slots * self.fills // 2

    @property
    def name(self) -> str:
        return f"{super().name}-e{self.every or 0}"

    def settings(self, model: Path, folder: Path) -> tuple[str, ...]:
        added = () if self.every is None else (f"evaluation.every={self.every}",)
        prompts = (f"evaluation.prompts={self.prompts if self.every else 1}",)
        return (*super().settings(model, folder), *added, *prompts)


def compare(plain: Evaluated, folder: Path) -> dict[str, Any]:
    """A run without evaluation, the same with it, and the numbers of both."""
    model = folder / "model"
    if not model.exists():
        make_model(model, plain.lengths)
    evaluated = replace(plain, every=EVERY)
    before, after = (carry_out(one, model, folder) for one in (plain, evaluated))
    rounds = read_evaluations(folder / evaluated.name / "evaluations.jsonl")
    during = [one for one in rounds if one.when == "during"]
    planned = (plain.steps - 1) // EVERY
    return {
        "mode": plain.mode,
        "seed": plain.seed,
        "step_seconds": before.step_seconds,
        "step_seconds_evaluated": after.step_seconds,
        "slowdown": after.step_seconds / before.step_seconds,
        "samples_added": evaluated.prompts / (EVERY * plain.groups_per_step * 8),
        "generator_idle": before.generator_device_idle,
        "generator_idle_evaluated": after.generator_device_idle,
        "rounds": len(during),
        "given_up": planned - len(during),
        "held_seconds": statistics.fmean(one.held_seconds for one in during) if during else None,
        "overrun": max(before.overrun, after.overrun),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of(__doc__, "two modes, one run of each").parse_args(arguments)
    modes = (VERIFY, KEEP_4) if options.quick else (VERIFY, SYNC, KEEP_1, KEEP_4)
    runs = [Evaluated(mode, seed=seed) for mode in modes for seed in range(pick(options, 3, 1, 1))]
    if options.smoke:
        (short,) = smoke()
        runs = [Evaluated(**(vars(short) | {"steps": EVERY + 2}))]
    with tempfile.TemporaryDirectory() as folder:
        found = [compare(one, Path(folder)) for one in runs]
    ratios = {
        f"slowdown_{mode}": statistics.fmean(o["slowdown"] for o in found if o["mode"] == mode)
        for mode in dict.fromkeys(one.mode for one in runs)
    }
    rows = (list(one.values()) for one in found)
    shown = table(f"evaluation every {EVERY} steps", list(found[0]), rows)
    report(options, "evaluation", {"runs": found}, ratios, shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
