"""Sample trajectories in the report: every token coloured by how it came to be."""

from __future__ import annotations

import math

from monitoring.report.markup import Child, Markup, element
from monitoring.samples import SampleRecord
from monitoring.wording import UNKNOWN, number

PROVENANCE_WORDS = {
    "sampled": "sampled by the engine",
    "drafted": "drafted from the cache and accepted",
    "verified": "kept from an older policy after verification",
}
MOST_TOKENS = 2000
"""Longer responses are cut in the report."""


def samples_legend() -> Markup:
    """What the colours of tokens mean."""
    items = [
        element("span", element("i", class_=f"swatch t-{key}"), words)
        for key, words in PROVENANCE_WORDS.items()
    ]
    marker = element("span", element("b", "v7", class_="version"), "policy version from here on")
    return element("div", items, marker, class_="legend")


def sample_card(record: SampleRecord) -> Markup:
    """One trajectory: prompt, response, reward, reference answer."""
    return element(
        "article",
        element("header", _facts(record)),
        element("div", element("h4", "Prompt"), element("pre", record.prompt), class_="part"),
        element("div", element("h4", "Response"), element("pre", *_tokens(record)), class_="part"),
        element(
            "div",
            element("h4", "Reference answer"),
            element("pre", UNKNOWN if record.answer is None else record.answer),
            class_="part",
        ),
        class_="sample",
    )


def _facts(record: SampleRecord) -> list[Child]:
    good = record.reward is not None and record.reward > 0
    facts: list[Child] = [
        element("strong", f"step {record.step}"),
        element("span", f"sample {record.sample_id}") if record.sample_id else None,
        element(
            "span", f"reward {number(record.reward)}", class_="chip good" if good else "chip bad"
        ),
        element("span", f"{len(record.tokens)} tokens"),
    ]
    for key in ("drafted", "verified"):
        share = record.provenance.count(key) / max(1, len(record.tokens))
        if share:
            facts.append(element("span", f"{share:.0%} {key}"))
    versions = len({segment.policy_version for segment in record.segments})
    if versions > 1:
        facts.append(element("span", f"{versions} policy versions"))
    if record.finish_reason == "length":
        facts.append(element("span", "cut at the token limit", class_="chip warn"))
    return facts


def _tokens(record: SampleRecord) -> list[Child]:
    starts = {segment.start: segment.policy_version for segment in record.segments}
    out: list[Child] = []
    for index, text in enumerate(record.tokens[:MOST_TOKENS]):
        if index in starts:
            out.append(
                element(
                    "b",
                    f"v{starts[index]}",
                    class_="version",
                    title=f"drawn under policy version {starts[index]} from here on",
                )
            )
        kind = record.provenance[index]
        out.append(element("span", text, class_=f"t-{kind}", title=_told(record, index)))
    if len(record.tokens) > MOST_TOKENS:
        out.append(element("em", f" … {len(record.tokens) - MOST_TOKENS} more tokens"))
    return out


def _told(record: SampleRecord, index: int) -> str:
    lines = [f"token {index}: {PROVENANCE_WORDS[record.provenance[index]]}"]
    logprob = record.logprobs[index] if record.logprobs is not None else None
    if logprob is not None:
        lines.append(f"probability {math.exp(min(0.0, logprob)):.3g} (log {logprob:.3f})")
    version = record.version_at(index)
    if version is not None:
        lines.append(f"policy version {version}")
    return "\n".join(lines)
