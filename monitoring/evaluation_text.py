"""Evaluations in words."""

from __future__ import annotations

from collections.abc import Iterator

from monitoring.wording import duration, number
from wire.evaluations import HELD_OUT, EvaluationRecord, SetEvaluation


def evaluation_lines(record: EvaluationRecord, *, is_best: bool = False) -> list[str]:
    """What a run says of an evaluation, a line per set.

    held-out accuracy before training: 0.664 ± 0.058 (256 samples, drawn as in training)
    held-out accuracy of step 40: 0.711 ± 0.056 (256 samples, drawn as in training), the best so far
    """
    when = f"of step {record.step}" if record.when == "during" else f"{record.when} training"
    lines = []
    for name, one in record.sets.items():
        of_set = "" if name == HELD_OUT else f" on {name}"
        lines.append(f"held-out accuracy {when}{of_set}: {estimates(one)}")
    if record.when == "during" and lines:
        lines[0] += ", the best so far" if is_best else ""
        if record.held_seconds >= 0.05:
            lines[0] += f"; it held new weights back for {duration(record.held_seconds)}"
    return lines or [f"no held-out prompts, so no accuracy {when}"]


def estimates(one: SetEvaluation) -> str:
    """`0.664 ± 0.058 (256 samples, drawn as in training), pass@4 0.902`."""
    text = f"{one.accuracy:.3f} ± {one.margin:.3f} ({one.samples:,} samples, drawn as in training)"
    return ", ".join([text, *_passes(one)])


def _passes(one: SetEvaluation) -> Iterator[str]:
    for k, value in one.pass_at.items():
        if k > 1:
            yield f"pass@{k} {number(value, 3)}"
