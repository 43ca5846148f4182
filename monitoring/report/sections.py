"""What all sections of the report share, and the two short ones: samples and configuration."""

from __future__ import annotations

import re

from asyncrl.monitoring.records.samples import choose_samples
from asyncrl.monitoring.report.data import RunData
from asyncrl.monitoring.report.markup import Child, Markup, element
from asyncrl.monitoring.report.samples import sample_card, samples_legend

OPEN_SAMPLES = 4
"""This many sample trajectories are shown at once. The others unfold."""


def section(title: str, about: str, *content: Child) -> Markup:
    """A heading, a sentence on what the section shows, and its content."""
    return element("section", element("h2", title), element("p", about, class_="about"), *content)


def samples(data: RunData) -> Markup | None:
    """A few trajectories, token by token."""
    chosen = choose_samples(data.samples, data.max_samples)
    if not chosen:
        return None
    cards = [sample_card(record) for record in reversed(chosen)]
    rest = cards[OPEN_SAMPLES:]
    more = element(
        "details", element("summary", f"{len(rest)} more from earlier in the run"), *rest
    )
    return section(
        "Sample trajectories",
        "Newest first. The colour of a token shows where it came from; point at a token for its "
        "probability.",
        samples_legend(chosen),
        *cards[:OPEN_SAMPLES],
        more if rest else None,
    )


def orders(data: RunData) -> Markup | None:
    """What the user changed while the run was active."""
    if not data.orders:
        return None
    lines = [
        element(
            "li",
            f"step {one.step}: ",
            element("b", " ".join([one.order, *(f"{k}={v}" for k, v in one.arguments.items())])),
            f" ({one.effect})",
        )
        for one in data.orders
    ]
    about = "Given while the run was active; each with the steps that were trained when it held."
    return section("Orders", about, element("ul", lines))


def settings(data: RunData) -> Markup | None:
    """The run's configuration, defaults included."""
    if not data.config_text:
        return None
    lines: list[Child] = []
    for line in data.config_text.splitlines():
        match = re.match(r"^([\s-]*)([\w.-]+)(:)(\s.*)?$", line)
        if match:
            indent, key, colon, value = match.groups()
            lines += [indent, element("b", key, class_="c1"), colon, value or "", "\n"]
        else:
            lines.append(line + "\n")
    return section(
        "Configuration",
        "Complete, with all defaults. The same run again: asyncrl run config.yaml",
        element("details", element("summary", "config.yaml"), element("pre", lines)),
    )
