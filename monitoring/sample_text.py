"""`asyncrl samples`: trajectories in a terminal, each token in the colour of its origin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.text import Text

from monitoring.samples import SampleRecord
from monitoring.wording import UNKNOWN, number, without_controls

_STYLES = {"sampled": "", "drafted": "green", "verified": "cyan"}
"""Of tokens, by origin. Without colours, drafted tokens stand in [ ], verified ones in { }."""
_BRACKETS = {"sampled": ("", ""), "drafted": ("[", "]"), "verified": ("{", "}")}


def legend(*, colours: bool) -> Text:
    """What the colours, or the brackets, mean."""
    words = {"drafted": "drafted and accepted", "verified": "of an older policy, verified"}
    parts = [Text("tokens: sampled")]
    for kind, meaning in words.items():
        opening, closing = ("", "") if colours else _BRACKETS[kind]
        parts.append(Text(f"{opening}{meaning}{closing}", style=_STYLES[kind] if colours else ""))
    return Text(", ").join(parts)


def sample_text(record: SampleRecord, *, colours: bool) -> Text:
    """One trajectory: a line of facts, the prompt, the response, the reference answer."""
    text = Text()
    reward = number(record.reward)
    style = "bold green" if record.reward is not None and record.reward > 0 else "bold red"
    text.append(f"step {record.step}", style="bold")
    if record.sample_id:
        text.append(f", sample {record.sample_id}")
    text.append(", reward ").append(reward, style=style)
    text.append(f", {len(record.tokens)} tokens")
    versions = sorted({segment.policy_version for segment in record.segments})
    text.append(f", policy version {' and '.join(map(str, versions))}\n")
    text.append(_clean(record.prompt), style="dim")
    for piece, kind in _runs(record):
        opening, closing = ("", "") if colours else _BRACKETS[kind]
        text.append(f"{opening}{_clean(piece)}{closing}", style=_STYLES[kind] if colours else "")
    text.append("\nreference: ", style="dim")
    text.append(UNKNOWN if record.answer is None else _clean(record.answer), style="dim")
    return text


def newest(records: Iterable[SampleRecord], count: int) -> list[SampleRecord]:
    """The last samples, in the order in which they were trained on."""
    return sorted(records, key=lambda record: record.step)[-count:] if count else []


def _runs(record: SampleRecord) -> Iterator[tuple[str, str]]:
    """Neighbouring tokens of one origin, as (text, origin)."""
    piece, kind = "", ""
    for token, origin in zip(record.tokens, record.provenance, strict=True):
        if origin != kind and piece:
            yield piece, kind
            piece = ""
        piece, kind = piece + token, origin
    if piece:
        yield piece, kind


def _clean(text: str) -> str:
    return without_controls(text)
