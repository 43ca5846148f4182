"""The tables that benchmarks.vocabulary prints."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from benchmarks.vocabulary.findings import Findings, Pair

TARGETS = {"kept_tail_vs_all": 0.9, "kept_flat": 0.3, "draw_vs_before": 0.5}
_BEST_LOW = ("draw_vs_before",)


def tables(findings: Findings) -> Iterator[Table]:
    """All measurements, then every target with its result."""
    made = findings.model
    yield _pairs(
        f"language model: {made['vocabulary']:,} tokens, {made['parameters'] / 1e6:.1f}M "
        f"parameters, held-out perplexity {made['held_out_perplexity']:.0f}",
        findings.language,
    )
    yield _pairs("flat model: 5,000 tokens, nothing learned", [findings.flat])
    yield _chains(findings)
    yield _costs(findings)
    yield _targets(findings)


def _columns(table: Table, titles: str) -> Table:
    for title in titles.split(","):
        table.add_column(title, justify="right")
    return table


def _pairs(title: str, pairs: list[Pair]) -> Table:
    table = _columns(
        Table(title=title, min_width=60),
        "versions,T,TV a token,entropy,length,K,outside K,tail lost,tail a symbol,all,engine",
    )
    for pair in pairs:
        for length, by_k in pair.expected.kept.items():
            for k, shares in by_k.items():
                judged = k == pair.k and length == max(pair.expected.kept)
                table.add_row(
                    f"{pair.earlier} → {pair.later}",
                    f"{pair.temperature:g}",
                    f"{pair.expected.drift:.4f}",
                    f"{pair.expected.entropy:.2f}",
                    str(length),
                    str(k),
                    f"{pair.expected.outside[k]:.3f}",
                    *(f"{shares[rule]:.3f}" for rule in ("lost_tail", "tail", "all")),
                    f"{pair.engine_share:.3f}" if judged else "",
                )
    table.caption = "kept share of the earlier version's texts, by rule; engine: as measured"
    return table


def _chains(findings: Findings) -> Table:
    table = _columns(
        Table(title="Markov chains: kept share by rule"),
        "vocabulary,length,K,TV a token,outside K,tail lost,tail a symbol,all",
    )
    for chain in findings.chains:
        table.add_row(
            *(f"{chain[name]:.0f}" for name in ("vocabulary", "length", "k")),
            f"{chain['drift']:.4f}",
            *(f"{chain[name]:.3f}" for name in ("drawn_outside", "lost_tail", "tail", "all")),
        )
    return table


def _costs(findings: Findings) -> Table:
    table = _columns(
        Table(title="microseconds per token, 64 rows"),
        "vocabulary,K,head,softmax,list before,draw before,draw and list,list,verification,"
        "now / before",
    )
    parts = ("head", "softmax", "before_list", "before_draw", "draw", "list", "verify")
    for cost in findings.costs:
        table.add_row(
            f"{cost.vocabulary:,}",
            str(cost.k),
            *(f"{cost.parts[part]:,.0f}" for part in parts),
            f"{cost.draw_vs_before:.3f}",
        )
    return table


def _targets(findings: Findings) -> Table:
    table = _columns(Table(title="targets"), "name,result,target")
    for name, value in findings.ratios().items():
        target = TARGETS.get(name)
        sign = "at most" if name in _BEST_LOW else "at least"
        table.add_row(name, f"{value:.3f}", "" if target is None else f"{sign} {target}")
    return table
