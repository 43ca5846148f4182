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
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.exactness import engines as exactness_engines
from benchmarks.exactness import kept
from benchmarks.exactness.kept import TRAPS, Shares, trained
from benchmarks.exactness.model import Codes, Doubles
from benchmarks.exactness.pure import PURE, default_pair
from benchmarks.exactness.stats import Distance, distance
from benchmarks.harness import names_of, parser_of, pick, report, table

ALARM = 1e-6
FULL, QUICK = 1_000_000, 20_000
_WAVE = 50_000
KINDS = exactness_engines.KINDS
MODES = (*PURE, *TRAPS, *exactness_engines.MODES)


def modes_of(engine: str | None) -> list[str]:
    """The modes of an engine; None: all modes there are."""
    return [mode for mode in MODES if engine is None or mode.startswith(f"{engine}-")]


@dataclass
class Finding:
    mode: str
    exact: bool
    """Whether the mode must be exact; otherwise its bias must be detected."""
    distance: Distance
    seconds: float
    notes: dict[str, float] = field(default_factory=dict)
    """Sums over the samples, such as tokens drafted and accepted."""

    @property
    def as_expected(self) -> bool:
        """No deviation was detected in an exact mode, or the bias of a biased one was."""
        return (self.distance.p_value >= ALARM) == self.exact

    def as_dict(self) -> dict[str, Any]:
        return {
            "exact": self.exact,
            "fine": self.as_expected,
            "seconds": self.seconds,
            **self.distance.as_dict(),
            **self.notes,
        }


@dataclass
class Tally:
    """Counts of samples in two independent halves, and sums of notes."""

    probabilities: Doubles
    """`[C]` of the cells, under the policy to be sampled."""
    halves: np.ndarray[Any, np.dtype[np.int64]] = field(init=False)
    notes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.halves = np.zeros((2, len(self.probabilities)), np.int64)

    def add(self, cells: Codes, notes: dict[str, float]) -> None:
        """Add a wave of samples; they go to the two halves alternately."""
        for half in (0, 1):
            self.halves[half] += np.bincount(cells[half::2], minlength=len(self.probabilities))
        for name, value in notes.items():
            self.notes[name] = self.notes.get(name, 0.0) + value

    def finding(self, mode: str, exact: bool, began: float) -> Finding:
        """Compare the counts with the enumerated distribution."""
        seconds = time.perf_counter() - began
        return Finding(mode, exact, distance(self.halves, self.probabilities), seconds, self.notes)


def run_pure(mode: str, samples: int, seed: int) -> Finding:
    """Run a mode that needs no engine."""
    began = time.perf_counter()
    rng = np.random.default_rng([seed, MODES.index(mode)])
    if mode in TRAPS:
        trap, exact = TRAPS[mode]
        tally = Tally(trained().pair_distribution())
        for count in _waves(samples):
            tally.add(*trap(rng, count))
        return tally.finding(mode, exact, began)
    sampler, exact = PURE[mode]
    pair = default_pair()
    tally = Tally(pair.new.sequence_distribution())
    for count in _waves(samples):
        tally.add(*sampler(pair, rng, count))
    return tally.finding(mode, exact, began)


def run_engine(kind: str, modes: Sequence[str], samples: int, seed: int) -> Iterator[Finding]:
    """Run modes of one engine. Raises `UnavailableError` where it cannot run."""
    with exactness_engines.open_bench(kind, seed) as bench:
        for mode in modes:
            began = time.perf_counter()
            tally = Tally(bench.probabilities)
            for cells, notes in bench.waves(mode, samples):
                tally.add(cells, notes)
            yield tally.finding(mode, True, began)


def _waves(samples: int) -> Iterator[int]:
    for start in range(0, samples, _WAVE):
        yield min(_WAVE, samples - start)


def tables(
    findings: Sequence[Finding], missing: dict[str, str], shares: Sequence[Shares]
) -> list[Table]:
    rows = []
    for one in findings:
        seen, drafted = one.distance, one.notes.get("drafted", 0.0)
        rows.append([
            one.mode, "exact" if one.exact else "biased", f"{seen.samples:,}", f"{seen.tv:.4f}",
            f"{seen.tv_low:.4f} .. {seen.tv_high:.4f}",
            f"{seen.tv_by_chance:.4f}, 99.9%: {seen.tv_by_chance_999:.4f}", f"{seen.p_value:.2g}",
            one.notes["accepted"] / drafted if drafted else None, f"{one.seconds:.0f}",
            "ok" if one.as_expected else "WRONG",
        ])  # fmt: skip
    rows += [[mode, "exact", "MISSING", *[None] * 6, why] for mode, why in missing.items()]
    return [
        table(
            "total variation from the enumerated distribution",
            "mode,must be,samples,TV,95% of the sampler's TV,exact by chance,p-value,accepted,"
            "seconds,verdict",
            rows,
        ),
        table(
            "share of kept tokens that each rule keeps (64 tokens, Markov)",
            "length,K,TV a token,outside A,token by token,by block,SPEC-RL l=1",
            (list(one.as_dict().values()) for one in shares),
        ),
    ]


def measure(modes: Sequence[str], samples: int, seed: int) -> tuple[list[Finding], dict[str, str]]:
    """Run the modes; returns the findings, and for each mode that cannot run the reason."""
    findings = [run_pure(mode, samples, seed) for mode in modes if mode in PURE or mode in TRAPS]
    missing: dict[str, str] = {}
    for kind in KINDS:
        wanted = [mode for mode in modes if mode.startswith(f"{kind}-")]
        done: list[Finding] = []
        try:
            done.extend(run_engine(kind, wanted, samples, seed) if wanted else ())
        except exactness_engines.UnavailableError as error:
            missing |= dict.fromkeys(wanted[len(done) :], str(error))
        findings += done
    return findings, missing


def ratios(findings: Sequence[Finding]) -> dict[str, float]:
    """Total variation over its mean by chance; about 1 for an exact sampler."""
    return {
        f"tv_vs_chance_{one.mode}": one.distance.tv / one.distance.tv_by_chance for one in findings
    }


SMOKE_SAMPLES = 1000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, f"{QUICK:,} samples for each mode")
    parser.add_argument("--samples", type=int, help=f"for each mode; default {FULL:,}")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--engine", choices=KINDS, help="its modes only")
    some.add_argument("--modes", help=f"some of {', '.join(MODES)}; default: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    asked = options.modes or ",".join(modes_of(options.engine))
    modes = names_of(parser, asked, MODES)
    if options.smoke and not (options.modes or options.engine):
        modes = [mode for mode in modes if mode in (*PURE, *TRAPS, "torch-chain")]
    samples = pick(options, options.samples or FULL, options.samples or QUICK, SMOKE_SAMPLES)
    if samples < 1000:
        parser.error("--samples must be at least 1,000")
    findings, missing = measure(modes, samples, options.seed)
    shares = [] if options.engine else kept.table(pick(options, 200_000, 20_000, 512))
    for mode, why in missing.items():
        print(f"MISSING: {mode} was not certified: {why}", file=sys.stderr)
    raw = {
        "modes": {one.mode: one.as_dict() for one in findings},
        "missing": missing,
        "kept": [one.as_dict() for one in shares],
    }
    report(options, "exactness", raw, ratios(findings), *tables(findings, missing, shares))
    return 0 if options.smoke or all(one.as_expected for one in findings) else 1
