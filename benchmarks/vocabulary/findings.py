"""What benchmarks.vocabulary has measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from benchmarks.harness import table, targets_table
from benchmarks.vocabulary.cost import Cost
from benchmarks.vocabulary.expected import Expected

TARGETS = {"kept_tail_vs_all": 0.9, "kept_flat": 0.3}


def tables(findings: Findings) -> Iterator[Table]:
    """All measurements, then every target with its result."""
    made = findings.model
    yield _pairs(
        f"language model: {made['vocabulary']:,} tokens, {made['parameters'] / 1e6:.1f}M "
        f"parameters, held-out perplexity {made['held_out_perplexity']:.0f}",
        findings.language,
    )
    yield _pairs("flat model: 5,000 tokens, nothing learned", [findings.flat])
    yield table(
        "microseconds per token, 64 rows",
        ("vocabulary", "K", *findings.costs[0].parts),
        ((one.vocabulary, one.k, *one.parts.values()) for one in findings.costs),
    )
    yield targets_table(
        findings.ratios(), TARGETS, TARGETS, lambda name, value: value >= TARGETS[name]
    )


def _pairs(title: str, pairs: list[Pair]) -> Table:
    return table(
        title,
        "versions,T,TV a token,entropy,length,K,outside K,tail a symbol,all,engine",
        (
            (
                f"{pair.earlier} → {pair.later}", pair.temperature, pair.expected.drift,
                pair.expected.entropy, length, k, pair.expected.outside[k], shares["tail"],
                shares["all"],
                pair.engine_share if (k, length) == (pair.k, max(pair.expected.kept)) else None,
            )
            for pair in pairs
            for length, by_k in pair.expected.kept.items()
            for k, shares in by_k.items()
        ),
        caption="kept share of the earlier version's texts; engine: as measured",
    )  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two policy versions, and texts of the earlier one."""

    earlier: int
    later: int
    temperature: float
    tokens: int
    k: int
    """K of the engine."""
    engine_share: float
    """Of the tokens, kept by the torch engine."""
    engine_outside: float
    """Share of the tokens that were drawn outside the engine's list."""
    expected: Expected

    def longest(self, k: int) -> dict[str, float]:
        """Expected share of whole texts by rule."""
        return self.expected.kept[max(self.expected.kept)][k]


@dataclass(frozen=True)
class Findings:
    model: dict[str, Any]
    """How the language model was made, and its perplexity."""
    rewards: dict[str, float]
    """Of its policy steps."""
    language: list[Pair]
    """One step apart, and several."""
    flat: Pair
    costs: list[Cost]

    def ratios(self) -> dict[str, float]:
        """The numbers with a target, by name, and what they are made of.

        `kept_tail_vs_all` divides two expectations over the same texts, whose noise cancels. That
        the engine keeps what is expected is `engine_vs_expected`, over all pairs of versions.
        """
        shares = self.language[0].longest(self.language[0].k)
        pairs = [*self.language, self.flat]
        dearest = max(self.costs, key=lambda cost: (cost.vocabulary, cost.k))
        return {
            "kept_tail_vs_all": shares["tail"] / shares["all"],
            "kept_flat": self.flat.engine_share,
            "engine_vs_expected": sum(pair.engine_share for pair in pairs)
            / sum(pair.longest(pair.k)["tail"] for pair in pairs),
            "kept_flat_expected": self.flat.longest(self.flat.k)["tail"],
            "draw_vs_head": dearest.parts["draw"] / dearest.parts["head"],
            "verification_vs_head": dearest.parts["verify"] / dearest.parts["head"],
        }
