"""`asyncrl samples`: trajectories in a terminal, each token coloured by its origin."""

from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from asyncrl.monitoring.records.samples import SampleRecord, newest_samples
from asyncrl.monitoring.records.trained_samples import TrainedSample, newest_trained
from asyncrl.monitoring.terminal.formatting import counted, ended, number
from asyncrl.monitoring.terminal.formatting import without_controls as _clean

_STYLES = {"sampled": "", "drafted": "green", "verified": "cyan", "observed": "dim"}
_CONTEXT = "context"
"""Marks the beginning of a context, in place of an origin."""
_BRACKETS = {"drafted": ("[", "]"), "verified": ("{", "}"), "observed": ("(", ")")}
"""Marks of tokens without colours."""


def legend(*, colours: bool) -> Text:
    """Explain the colours, or the brackets."""
    words = {
        "drafted": "drafted and accepted",
        "verified": "of an older policy, verified",
        "observed": "of an environment",
    }
    parts = [Text("tokens: sampled")]
    for kind, meaning in words.items():
        opening, closing = ("", "") if colours else _BRACKETS[kind]
        parts.append(Text(f"{opening}{meaning}{closing}", style=_STYLES[kind] if colours else ""))
    return Text(", ").join(parts)


def sample_text(record: SampleRecord | TrainedSample, *, colours: bool) -> Text:
    """One trajectory: a line of facts, the prompt, the response, the reference answer.

    A record of `samples/` does not have the origin of each token, but their numbers.
    """
    if isinstance(record, TrainedSample):
        text = _facts(record, record.response_length, record.observed, record.turns)
        text.append(_clean(record.prompt), style="dim").append(_clean(record.response))
        counts = f"{record.sampled} sampled, {record.drafted} drafted, {record.verified} verified"
        return text.append(f"\ntokens: {counts}", style="dim")
    text = _facts(record, len(record.tokens), record.count("observed"), record.turns)
    text.append(_clean(record.prompt), style="dim")
    for piece, kind in _runs(record):
        if kind == _CONTEXT:
            text.append(f"\n{piece}\n", style="bold")
            continue
        opening, closing = ("", "") if colours else _BRACKETS.get(kind, ("", ""))
        text.append(f"{opening}{_clean(piece)}{closing}", style=_STYLES[kind] if colours else "")
    if record.answer is not None:
        text.append("\nreference: ", style="dim").append(_clean(record.answer), style="dim")
    return text


def _facts(record: SampleRecord | TrainedSample, tokens: int, observed: int, turns: int) -> Text:
    text = Text()
    reward = number(record.reward)
    style = "bold green" if record.reward is not None and record.reward > 0 else "bold red"
    text.append(f"step {record.step}", style="bold")
    if record.sample_id:
        text.append(f", sample {record.sample_id}")
    text.append(", reward ").append(reward, style=style)
    if len(record.rewards) > 1:
        parts = ", ".join(f"{name} {number(value)}" for name, value in record.rewards.items())
        text.append(f" ({_clean(parts)})")
    if observed:
        text.append(f", {counted(turns, 'turn')}")
    text.append(f", {counted(tokens, 'token')}")
    if observed:
        text.append(f" ({observed} of the environment)")
    if cut := ended(record.finish_reason, several_turns=observed > 0):
        text.append(f", {cut}")
    versions = sorted({segment.policy_version for segment in record.segments})
    return text.append(f", policy version {' and '.join(map(str, versions))}\n")


def newest(run: Path, count: int) -> list[SampleRecord | TrainedSample]:
    """The last samples of a run, in step order; those with each token's origin rather."""
    recorded = newest_samples(run, count)
    known = {(one.step, one.sample_id) for one in recorded}
    logged = newest_trained(run / "samples", count + len(recorded))
    others = [one for one in logged if (one.step, one.sample_id) not in known]
    both: list[SampleRecord | TrainedSample] = [*others, *recorded]
    return sorted(both, key=lambda one: one.step)[-count:]


def _runs(record: SampleRecord) -> Iterator[tuple[str, str]]:
    """Yield runs of tokens of one origin, as (text, origin), and the beginnings of contexts."""
    piece, kind = "", ""
    for place, (token, origin) in enumerate(zip(record.tokens, record.provenance, strict=True)):
        begins = place in record.contexts
        if (begins or origin != kind) and piece:
            yield piece, kind
            piece = ""
        if begins:
            yield "-- another context --", _CONTEXT
        piece, kind = piece + token, origin
    if piece:
        yield piece, kind
