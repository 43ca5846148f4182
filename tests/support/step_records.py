"""Step records for tests, made of the production type itself."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from asyncrl.wire.records.step import StepMetrics

_DECODER = msgspec.json.Decoder(StepMetrics)
"""msgspec learns a type when it is first used, and crashes if two threads do that at once."""


def full_step() -> StepMetrics:
    """A record in which every number is greater than 0 and different from all others."""
    counter = itertools.count(1)
    named = {
        "algorithm": {"one_signal": 0.5, "not_measured": None},
        "exactly_on_policy": True,
        "why": "a reason",
    }

    def filled(kind: type[msgspec.Struct]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for field in msgspec.structs.fields(kind):
            if field.name in named:
                values[field.name] = named[field.name]
            elif field.name == "rewards":
                values[field.name] = {"format": next(counter), "score": next(counter)}
            elif field.name == "reward_failures":
                values[field.name] = {"score": {"raised": next(counter)}}
            elif isinstance(field.default, msgspec.Struct):
                values[field.name] = filled(type(field.default))
            elif field.default_factory is dict:
                values[field.name] = {next(counter): next(counter)}
            elif field.name == "wrong_policy":
                values[field.name] = (f"finding {next(counter)}",)
            elif field.default == ():
                values[field.name] = (next(counter), next(counter))
            else:
                values[field.name] = next(counter)
        return _consistent(values)

    return _DECODER.decode(msgspec.json.encode(filled(StepMetrics)))


def _consistent(values: dict[str, Any]) -> dict[str, Any]:
    """A part is smaller than its whole, in the noise floor."""
    for whole, part in (("samples", "cut_samples"), ("judged", "rejected")):
        if part in values and whole in values:
            values[whole], values[part] = values[part], values[whole]
    return values
