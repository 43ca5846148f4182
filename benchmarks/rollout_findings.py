"""What benchmarks.rollout found: single passes, their medians, the table and the flat ratios."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Pass:
    """All samples of some prompts, written once by one engine."""

    tokens: int
    seconds: float
    steps: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Response tokens per second."""
        return self.tokens / self.seconds


@dataclass
class Rows:
    """Everything timed at one number of rows."""

    samples: int
    """Of one pass."""
    first_epoch: list[Pass] = field(default_factory=list)
    """The drafting engine, before it had seen the prompts."""
    plain: list[Pass] = field(default_factory=list)
    drafted: list[Pass] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Medians over the repeats; shares over all of them."""
        plain = statistics.median(one.rate for one in self.plain)
        drafted = statistics.median(one.rate for one in self.drafted)
        first = statistics.median(one.rate for one in self.first_epoch)
        pairs = [d.rate / p.rate for d, p in zip(self.drafted, self.plain, strict=True)]
        proposed = sum(one.drafted for one in self.drafted)
        accepted = sum(one.accepted for one in self.drafted)
        return {
            "plain_tokens_per_second": plain,
            "drafted_tokens_per_second": drafted,
            "accepted_tokens_per_step": accepted / max(1, sum(one.steps for one in self.drafted)),
            "acceptance": accepted / proposed if proposed else 0.0,
            "ratio": drafted / plain,
            "ratio_lowest": min(pairs),
            "ratio_highest": max(pairs),
            "first_epoch_ratio": first / plain,
        }


@dataclass
class Findings:
    """What was measured, and what was not."""

    measured: dict[str, dict[int, Rows]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Engine to the reason why its numbers are not there."""
    failed: bool = False

    def raw(self) -> dict[str, Any]:
        """For the JSON: every pass, and the summaries."""
        return {
            "not_measured": self.missing,
            **{
                f"{kind}_b{rows}": {**found.summary(), **asdict(found)}
                for kind, by_rows in self.measured.items()
                for rows, found in by_rows.items()
            },
        }

    def ratios(self) -> dict[str, float]:
        """Flat, one number per name."""
        ratios: dict[str, float] = {}
        for kind, by_rows in self.measured.items():
            for rows, found in by_rows.items():
                summary = found.summary()
                ratios[f"{kind}_b{rows}_drafted_vs_plain"] = summary["ratio"]
                ratios[f"{kind}_b{rows}_first_epoch_vs_plain"] = summary["first_epoch_ratio"]
        return ratios

    def table(self) -> Table:
        """For people."""
        table = Table(title="rollout: epoch 2, drafted against plain")
        titles = (
            "engine,rows,plain tok/s,drafted tok/s,accepted/step,acceptance,ratio,range,epoch 1"
        )
        for title in titles.split(","):
            table.add_column(title, justify="right")
        for kind, by_rows in self.measured.items():
            for rows, found in by_rows.items():
                s = found.summary()
                table.add_row(
                    *(kind, str(rows)),
                    f"{s['plain_tokens_per_second']:,.0f}",
                    f"{s['drafted_tokens_per_second']:,.0f}",
                    f"{s['accepted_tokens_per_step']:.2f}",
                    f"{s['acceptance']:.2f}",
                    f"{s['ratio']:.2f}",
                    f"{s['ratio_lowest']:.2f}-{s['ratio_highest']:.2f}",
                    f"{s['first_epoch_ratio']:.2f}",
                )
        for kind in self.missing:
            table.add_row(kind, *["[bold red]MISSING[/]"] * 8)
        return table
