"""Evaluations in words."""

from collections.abc import Iterator

from asyncrl.monitoring.terminal.formatting import duration, number
from asyncrl.wire.records.evaluations import (
    HELD_OUT,
    EvaluationRecord,
    SetEvaluation,
    accuracy_of,
    graded_reward_of,
)


def evaluation_lines(
    record: EvaluationRecord, *, is_best: bool = False, is_known: bool = False
) -> list[str]:
    """Describe an evaluation, a line per set; `is_known`: it was measured before a resume."""
    when = f"of step {record.step}" if record.when == "during" else f"{record.when} training"
    when += " (measured at the start)" if is_known else ""
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
    """`0.664 (0.604 to 0.719 at 95%; 256 samples, ...), pass@4 0.902`, or why there is none."""
    if one.accuracy is None:
        return f"incomplete, {_too_few(one)}"
    drawn = "drawn as in training"
    if one.temperature is not None:
        drawn = f"at temperature {one.temperature:g}" if one.temperature else "greedy"
    about = [f"{one.samples:,} samples, {drawn}"]
    if one.unscored:
        about.append(f"{one.unscored:,} more without a reward are left out")
    if one.failed:
        about.append(f"the rewards of {one.failed:,} failed and count as 0")
    if one.interval is not None:
        low, high = one.interval
        about.insert(0, f"{low:.3f} to {high:.3f} at 95%")
    text = f"{one.accuracy:.3f} ({'; '.join(about)})"
    reward = [] if one.graded_reward is None else [f"mean reward {one.graded_reward:.3f}"]
    return ", ".join([text, *reward, *_passes(one)])


def course(
    before: float | None, after: float | None, newest: EvaluationRecord | None, digits: int = 3
) -> str:
    """`0.410 → 0.523`, and before the end `0.410 → 0.500 (step 40)`, with the reward if graded."""
    about = []
    if after is None and (reached := accuracy_of(newest)) is not None and newest is not None:
        after = reached
        about.append(f"step {newest.step}")
    if (reward := graded_reward_of(newest)) is not None:
        about.append(f"mean reward {number(reward, digits)}")
    more = f" ({', '.join(about)})" if about else ""
    return f"{number(before, digits)} → {number(after, digits)}{more}"


def incomplete(record: EvaluationRecord | None) -> str | None:
    """Describe what an evaluation lacks: `evaluation of step 40 is incomplete: 120 of 256 ...`."""
    if record is None or record.is_complete:
        return None
    when = f"of step {record.step}" if record.when == "during" else f"{record.when} training"
    few = [(name, one) for name, one in record.sets.items() if not one.is_complete]
    lacks = [f"{_too_few(one)}{'' if name == HELD_OUT else f' on {name}'}" for name, one in few]
    return f"evaluation {when} is incomplete: {'; '.join(lacks)}"


def _too_few(one: SetEvaluation) -> str:
    if one.unscored:
        return f"{one.unscored:,} of {one.unscored + one.samples:,} samples have no reward"
    return f"the rewards of all {one.samples:,} samples failed"


def _passes(one: SetEvaluation) -> Iterator[str]:
    for k, value in one.pass_at.items():
        if k > 1:
            yield f"pass@{k} {number(value, 3)}"
