"""What benchmarks.vocabulary has measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.vocabulary.cost import Cost
from benchmarks.vocabulary.expected import Expected


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
    chains: list[dict[str, float]]
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
            "draw_vs_before": dearest.draw_vs_before,
            "engine_vs_expected": sum(pair.engine_share for pair in pairs)
            / sum(pair.longest(pair.k)["tail"] for pair in pairs),
            "kept_flat_expected": self.flat.longest(self.flat.k)["tail"],
            "draw_only_vs_before": dearest.draw_only_vs_before,
            "draw_vs_head": dearest.parts["draw"] / dearest.parts["head"],
            "verification_vs_head": dearest.parts["verify"] / dearest.parts["head"],
        }
