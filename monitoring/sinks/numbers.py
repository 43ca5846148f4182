"""The numbers of a record under the names of metrics.jsonl, sections joined by slashes.

>>> from asyncrl.wire.records.step import LearningMetrics, StepMetrics
>>> step = StepMetrics(step=3, time=1.0, learning=LearningMetrics(reward_mean=0.5))
>>> numbers_of_step(step)["learning/reward_mean"]
0.5
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from asyncrl.wire.records.evaluations import EvaluationRecord
from asyncrl.wire.records.step import StepMetrics

_LEFT_OUT = ("step", "time", "groups", "batch/response_lengths")
"""Identity, and what is not one number per step."""


def numbers_of_step(step: StepMetrics) -> dict[str, float]:
    """The numbers of one optimizer step; what was not measured is left out."""
    return dict(_numbers("", msgspec.to_builtins(step, str_keys=True)))


def numbers_of_evaluation(record: EvaluationRecord) -> dict[str, float]:
    """The numbers of an evaluation: `evaluation/held_out/accuracy`, `.../pass_at/4`."""
    values = msgspec.to_builtins(record, str_keys=True)
    about = {key: values[key] for key in ("seconds", "held_seconds")}
    return dict(_numbers("evaluation/", {**about, **values["sets"]}))


def _numbers(outer: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        name = f"{outer}{key}"
        if name in _LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            yield from _numbers(f"{name}/", value)
        elif isinstance(value, bool | int | float) and math.isfinite(value):
            yield name, float(value)
