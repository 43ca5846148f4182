"""What benchmarks.rollout found: single passes, their medians, and the flat ratios."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.rollout.contestants import CHAIN, OURS, PLAIN, SUFFIX

TARGETS = {
    "vllm_b1_vs_plain": 5.0,
    "vllm_b1_vs_suffix": 1.3,
    "vllm_b2_vs_plain": 3.5,
    "vllm_b8_vs_plain": 1.4,
    "vllm_b32_vs_plain": 0.97,
    "vllm_b128_vs_plain": 0.97,
    "tree_vs_chain": 1.25,
    "verify_kept_vs_specrl": 1.0,
    "overhead_b64": 0.03,
}
"""Least value of each ratio (`overhead_b64`: it must stay under)."""
CEILINGS = frozenset({"overhead_b64"})
TREE_NODES = 32
"""Nodes per row at which `tree_vs_chain` is taken, see `benchmarks.rollout.trees`."""


@dataclass(frozen=True)
class Pass:
    """All samples of some prompts, written once by one engine."""

    tokens: int
    seconds: float
    steps: int
    """Forward passes."""
    drafted: int
    accepted: int
    asleep_cpu: float = 0.0
    """Processor seconds that the other contestants' processes used meanwhile."""

    @property
    def rate(self) -> float:
        """Response tokens per second."""
        return self.tokens / self.seconds

    @property
    def seconds_per_step(self) -> float:
        """Of a forward pass, with whatever lies between two of them."""
        return self.seconds / max(1, self.steps)

    def __sub__(self, shorter: Pass) -> Pass:
        """What a longer pass did beyond a shorter one of the same requests."""
        return Pass(
            self.tokens - shorter.tokens,
            self.seconds - shorter.seconds,
            self.steps - shorter.steps,
            self.drafted - shorter.drafted,
            self.accepted - shorter.accepted,
            self.asleep_cpu + shorter.asleep_cpu,
        )


@dataclass(frozen=True)
class Versus:
    """A ratio of two contestants' tokens per second: median and range over the pairs of passes."""

    median: float
    lowest: float
    highest: float


@dataclass
class Rows:
    """Epoch 2 at one number of rows: for each contestant its passes, one per repeat."""

    samples: int
    """Of one pass."""
    passes: dict[str, list[Pass]] = field(default_factory=dict)

    def rate(self, name: str) -> float:
        """Median tokens per second of a contestant."""
        return statistics.median(one.rate for one in self.passes[name])

    def versus(self, name: str, other: str) -> Versus | None:
        """One contestant over another, pass by pass; None where one of them did not run."""
        if name not in self.passes or other not in self.passes:
            return None
        pairs = zip(self.passes[name], self.passes[other], strict=True)
        ratios = [one.rate / another.rate for one, another in pairs]
        return Versus(statistics.median(ratios), min(ratios), max(ratios))

    def drafting(self, name: str) -> dict[str, float]:
        """Acceptance, and tokens per forward pass (all its rows together), over all passes."""
        passes = self.passes[name]
        steps = max(1, sum(one.steps for one in passes))
        drafted = sum(one.drafted for one in passes)
        accepted = sum(one.accepted for one in passes)
        return {
            "acceptance": accepted / drafted if drafted else 0.0,
            "drafted_per_step": drafted / steps,
            "accepted_per_step": accepted / steps,
            "tokens_per_step": sum(one.tokens for one in passes) / steps,
        }


@dataclass
class Kind:
    """Everything measured of one kind of engine."""

    rows: dict[int, Rows] = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    """Rows to the seconds of a plain decode step."""
    overhead: list[tuple[Pass, Pass]] = field(default_factory=list)
    """Decode steps alone, plain and drafting, at 64 rows."""
    first_epoch: dict[str, Pass] = field(default_factory=dict)

    def bound(self, rows: int) -> float | None:
        """Speed-up over plain if every draft were accepted; None where no steps were measured.

        With T(n) for a step of n tokens: the best n / T(n) over rows / T(rows).
        """
        if rows not in self.steps:
            return None
        best = max(n / seconds for n, seconds in self.steps.items() if n >= rows)
        return best * self.steps[rows] / rows

    def overheads(self) -> list[float]:
        """Per repeat: time of a step of the drafting engine over a plain one, minus 1."""
        return [o.seconds_per_step / p.seconds_per_step - 1 for p, o in self.overhead]

    def asleep(self) -> float:
        """Most cores that the waiting contestants kept busy during any pass."""
        shares = [
            one.asleep_cpu / one.seconds
            for rows in self.rows.values()
            for passes in rows.passes.values()
            for one in passes
        ]
        return max(shares, default=0.0)


@dataclass
class Findings:
    """What was measured, and what was not."""

    measured: dict[str, Kind] = field(default_factory=dict)
    trees: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Nodes per row to accepted drafts per forward pass of chain and tree, see `rollout_trees`."""
    kept: dict[str, dict[str, float]] = field(default_factory=dict)
    """"v to v + 1" to the tokens that each rule keeps, see `benchmarks.rollout.kept`."""
    machine: dict[str, Any] = field(default_factory=dict)
    """Bandwidth and arithmetic, see `benchmarks.rollout.floor`."""
    missing: dict[str, str] = field(default_factory=dict)
    """What was left out, and why."""
    failed: bool = False

    def ratios(self) -> dict[str, float]:
        """Flat, one number per name; the same names as `TARGETS`, and more."""
        ratios: dict[str, float] = {}
        for kind, found in self.measured.items():
            for rows, at in found.rows.items():
                for other, name, suffix in (
                    (PLAIN, OURS, "vs_plain"),
                    (SUFFIX, OURS, "vs_suffix"),
                    (PLAIN, CHAIN, "chain_vs_plain"),
                    (PLAIN, SUFFIX, "suffix_vs_plain"),
                ):
                    versus = at.versus(name, other)
                    if versus is not None:
                        ratios[f"{kind}_b{rows}_{suffix}"] = versus.median
            if found.overhead:
                ratios[f"{kind}_overhead_b64"] = statistics.median(found.overheads())
        for kind in ("torch", "vllm"):  # vLLM's is the one that counts where it was measured
            if f"{kind}_overhead_b64" in ratios:
                ratios["overhead_b64"] = ratios[f"{kind}_overhead_b64"]
        chain, tree = self.trees.get(TREE_NODES, (0.0, 0.0))
        if chain:
            ratios["tree_vs_chain"] = tree / chain
        for name in ("verify_kept_vs_specrl", "verify_kept_vs_specrl_e05"):
            if self.kept:  # the less favourable of the pairs
                ratios[name] = min(pair[name] for pair in self.kept.values())
        return ratios

    def raw(self) -> dict[str, Any]:
        """For the JSON: every pass, and the summaries."""
        out: dict[str, Any] = {"not_measured": self.missing, "machine_floor": self.machine}
        out["verify_kept"] = self.kept
        out["accepted_per_forward_by_nodes"] = {
            nodes: {"chain": chain, "tree": tree} for nodes, (chain, tree) in self.trees.items()
        }
        for kind, found in self.measured.items():
            out[kind] = asdict(found) | {
                "most_cores_used_by_waiting_engines": found.asleep(),
                "bound_every_draft_accepted": {r: found.bound(r) for r in found.rows},
            }
            for rows, at in found.rows.items():
                out[f"{kind}_b{rows}"] = {
                    name: {"tokens_per_second": at.rate(name), **at.drafting(name)}
                    for name in at.passes
                }
        return out


def reached(name: str, value: float) -> bool:
    """Whether a ratio meets its target."""
    return value < TARGETS[name] if name in CEILINGS else value >= TARGETS[name]
