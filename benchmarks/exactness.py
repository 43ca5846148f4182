"""Which modes sample exactly from the policy, and by how much the others do not.

    python -m benchmarks.exactness [--quick] [--json FILE] [--samples N] [--modes a,b]

Each mode draws at least a million sequences from a policy whose law is enumerated, with drafts or
kept tokens of *another* policy, and is compared with that law: total variation with its 95%
confidence interval, what an exact sampler shows by chance at as many samples, and the p-value of
Pearson's chi-square. Modes on the enumerated model alone (`plain` .. `trap-untrained`) take
seconds, those of engines minutes. A mode that cannot run here is listed as MISSING.

Ends with status 1 if a mode that must be exact has a p-value below 1e-6 (false alarms: that times
the modes) or a biased one is not seen to be biased.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import exactness_engines, exactness_kept
from benchmarks.exactness_model import Codes, Doubles
from benchmarks.exactness_pure import PURE, default_world
from benchmarks.exactness_stats import Distance, distance
from benchmarks.exactness_trap import TRAPS, trained
from benchmarks.report import write_json

ALARM = 1e-6
FULL, QUICK = 1_000_000, 20_000
_WAVE = 50_000
MODES = (*PURE, *TRAPS, *exactness_engines.MODES)


@dataclass
class Finding:
    """One mode's result."""

    mode: str
    exact: bool
    """Whether it must be; otherwise a bias must show."""
    distance: Distance
    seconds: float
    notes: dict[str, float] = field(default_factory=dict)
    """Sums over the samples, such as tokens drafted and accepted."""

    @property
    def fine(self) -> bool:
        """Exact as far as can be seen, or biased as expected."""
        return (self.distance.p_value >= ALARM) == self.exact

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "exact": self.exact,
            "fine": self.fine,
            "seconds": self.seconds,
            **self.distance.as_dict(),
            **self.notes,
        }


@dataclass
class Tally:
    """Counts in two independent halves, and sums of notes."""

    law: Doubles
    halves: np.ndarray[Any, np.dtype[np.int64]] = field(init=False)
    notes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.halves = np.zeros((2, len(self.law)), np.int64)

    def add(self, cells: Codes, notes: dict[str, float]) -> None:
        """Another wave of samples; alternate samples go to the other half."""
        for half in (0, 1):
            self.halves[half] += np.bincount(cells[half::2], minlength=len(self.law))
        for name, value in notes.items():
            self.notes[name] = self.notes.get(name, 0.0) + value

    def finding(self, mode: str, exact: bool, began: float) -> Finding:
        """Compare with the law."""
        seconds = time.perf_counter() - began
        return Finding(mode, exact, distance(self.halves, self.law), seconds, self.notes)


def run_pure(mode: str, samples: int, seed: int) -> Finding:
    """One of the modes without an engine."""
    began = time.perf_counter()
    rng = np.random.default_rng([seed, MODES.index(mode)])
    if mode in TRAPS:
        trap, exact = TRAPS[mode]
        tally = Tally(trained().law())
        for count in _waves(samples):
            tally.add(*trap(rng, count))
        return tally.finding(mode, exact, began)
    sampler, exact = PURE[mode]
    world = default_world()
    tally = Tally(world.new.law())
    for count in _waves(samples):
        tally.add(*sampler(world, rng, count))
    return tally.finding(mode, exact, began)


def run_engine(kind: str, modes: Sequence[str], samples: int, seed: int) -> Iterator[Finding]:
    """Modes of one engine. Raises `exactness_engines.UnavailableError` where it cannot run."""
    with exactness_engines.open_bench(kind, seed) as bench:
        for mode in modes:
            began = time.perf_counter()
            tally = Tally(bench.law)
            for cells, notes in bench.waves(mode, samples):
                tally.add(cells, notes)
            yield tally.finding(mode, True, began)


def _waves(samples: int) -> Iterator[int]:
    for start in range(0, samples, _WAVE):
        yield min(_WAVE, samples - start)


def table(findings: Sequence[Finding], missing: dict[str, str]) -> Table:
    """What is printed."""
    out = Table(title="total variation from the enumerated law")
    for name in ("mode", "must be", "samples", "TV", "95% of the sampler's TV", "exact by chance"):
        out.add_column(name, justify="left" if name in ("mode", "must be") else "right")
    for name in ("p-value", "accepted", "seconds", ""):
        out.add_column(name, justify="right")
    for one in findings:
        seen, drafted = one.distance, one.notes.get("drafted", 0.0)
        out.add_row(
            one.mode,
            "exact" if one.exact else "biased",
            f"{seen.samples:,}",
            f"{seen.tv:.4f}",
            f"{seen.tv_low:.4f} .. {seen.tv_high:.4f}",
            f"{seen.tv_by_chance:.4f}, 99.9%: {seen.tv_by_chance_999:.4f}",
            f"{seen.p_value:.2g}",
            f"{one.notes['accepted'] / drafted:.3f}" if drafted else "",
            f"{one.seconds:.0f}",
            "ok" if one.fine else "WRONG",
        )
    for mode, why in missing.items():
        out.add_row(mode, "exact", "MISSING", *[""] * 6, why)
    return out


def kept_table(shares: Sequence[exactness_kept.Shares]) -> Table:
    """Tokens kept by each rule."""
    out = Table(title="share of kept tokens that each rule keeps (64 tokens, Markov)")
    names = ("length", "K", "TV a token", "outside A", "token by token", "by block", "SPEC-RL l=1")
    for name in names:
        out.add_column(name, justify="right")
    for one in shares:
        numbers = (one.outside, one.token, one.block, one.specrl_1)
        out.add_row(
            f"{one.length}",
            f"{one.top_k}",
            f"{one.tv_per_token:.4f}",
            *(f"{number:.3f}" for number in numbers),
        )
    return out


def measure(modes: Sequence[str], samples: int, seed: int) -> tuple[list[Finding], dict[str, str]]:
    """Run modes in their order. Gives what was found, and why others are missing."""
    findings = [run_pure(mode, samples, seed) for mode in modes if mode in PURE or mode in TRAPS]
    missing: dict[str, str] = {}
    for kind in exactness_engines.KINDS:
        wanted = [mode for mode in modes if mode.startswith(f"{kind}-")]
        done: list[Finding] = []
        try:
            done.extend(run_engine(kind, wanted, samples, seed) if wanted else ())
        except exactness_engines.UnavailableError as error:
            missing |= dict.fromkeys(wanted[len(done) :], str(error))
        findings += done
    return findings, missing


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="which modes sample exactly from the policy")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} samples for each mode")
    parser.add_argument("--samples", type=int, help=f"for each mode; default {FULL:,}")
    parser.add_argument("--modes", help=f"some of {', '.join(MODES)}; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the numbers here")
    options = parser.parse_args(arguments)
    modes = options.modes.split(",") if options.modes else list(MODES)
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        parser.error(f"no mode {unknown[0]!r}: {', '.join(MODES)}")
    samples = options.samples or (QUICK if options.quick else FULL)
    if samples < 1000:
        parser.error("--samples must be at least 1,000")
    console = Console(width=None if sys.stdout.isatty() else 150)
    findings, missing = measure(modes, samples, options.seed)
    shares = exactness_kept.table(options.quick)
    console.print(table(findings, missing))
    console.print(kept_table(shares))
    for mode, why in missing.items():
        print(f"MISSING: {mode} was not certified: {why}", file=sys.stderr)
    if options.json:
        raw = {
            "modes": {one.mode: one.as_dict() for one in findings},
            "missing": missing,
            "kept": [one.as_dict() for one in shares],
        }
        write_json(options.json, "exactness", raw, _ratios(findings))
    return 0 if all(one.fine for one in findings) else 1


def _ratios(findings: Sequence[Finding]) -> dict[str, float]:
    """TV over what chance shows: about 1 is exact."""
    return {
        f"tv_vs_chance_{one.mode}": one.distance.tv / one.distance.tv_by_chance for one in findings
    }


if __name__ == "__main__":
    sys.exit(main())
