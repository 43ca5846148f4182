"""Which modes sample exactly from the policy, and how biased the others are.

    python -m benchmarks.exactness [--quick] [--json FILE] [--samples N]
                                   [--engine torch|vllm|sglang | --modes a,b]

Each mode draws at least a million sequences from a policy whose distribution is enumerated, with
drafts or kept tokens of *another* policy. The samples are compared with that distribution: total
variation with its 95% confidence interval, the total variation that an exact sampler shows by
chance with as many samples, and the p-value of Pearson's chi-square test. Modes on the enumerated
model alone (`plain` .. `trap-untrained`) take seconds, those of engines minutes. A mode that cannot
run here is listed as MISSING. (SGLang's interpreter: `ASYNCRL_SGLANG_PYTHON`, or what a run takes.)

Exits with status 1 if a mode that must be exact has a p-value below 1e-6 (so the false-alarm rate
is 1e-6 times the number of modes) or if the bias of a biased mode is not detected.

Most imports are inside `main`: vLLM's engine process imports this module again, and vLLM's CPU
build (0.32.0) cannot start where numba has been imported before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.report import add_smoke, write_json

SMOKE_SAMPLES = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    from benchmarks.exactness import kept as exactness_kept
    from benchmarks.exactness import report

    parser = argparse.ArgumentParser(description="which modes sample exactly from the policy")
    parser.add_argument(
        "--quick", action="store_true", help=f"{report.QUICK:,} samples for each mode"
    )
    parser.add_argument("--samples", type=int, help=f"for each mode; default {report.FULL:,}")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--engine", choices=report.KINDS, help="its modes only")
    some.add_argument("--modes", help=f"some of {', '.join(report.MODES)}; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the numbers here")
    add_smoke(parser)
    options = parser.parse_args(arguments)
    modes = options.modes.split(",") if options.modes else report.modes_of(options.engine)
    if options.smoke and not (options.modes or options.engine):
        modes = [mode for mode in modes if mode in (*report.PURE, *report.TRAPS, "torch-chain")]
    unknown = [mode for mode in modes if mode not in report.MODES]
    if unknown:
        parser.error(f"no mode {unknown[0]!r}; the modes are {', '.join(report.MODES)}")
    samples = options.samples or (report.QUICK if options.quick else report.FULL)
    if options.smoke:
        samples = SMOKE_SAMPLES
    if samples < 1000:
        parser.error("--samples must be at least 1,000")
    console = Console(width=None if sys.stdout.isatty() else 150)
    findings, missing = report.measure(modes, samples, options.seed)
    shares = [] if options.engine else exactness_kept.table(quick=options.quick or options.smoke)
    console.print(report.table(findings, missing))
    if shares:
        console.print(report.kept_table(shares))
    for mode, why in missing.items():
        print(f"MISSING: {mode} was not certified: {why}", file=sys.stderr)
    if options.json:
        raw = {
            "modes": {one.mode: one.as_dict() for one in findings},
            "missing": missing,
            "kept": [one.as_dict() for one in shares],
        }
        ratios = report.ratios(findings)
        write_json(options.json, "exactness", raw, ratios, smoke=options.smoke)
    return 0 if options.smoke or all(one.as_expected for one in findings) else 1
