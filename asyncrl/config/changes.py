"""Settings that change at a step of a run: `run.changes`, written in advance or by `asyncrl set`.

    run:
      changes:
        100: {trainer.learning_rate: 1.0e-6}

Both ways are one way: an order adds its line here, so a run that was given the order and a run that
had the line from the beginning are the same, also when they continue from an earlier checkpoint.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from asyncrl.mutability import AT_A_STEP
from asyncrl.suggestions import nearest, shortened
from asyncrl.wire.transport.paths import MAX_STEPS

Value = bool | int | float | str | None
Changes = dict[Annotated[int, Field(ge=0, le=MAX_STEPS)], dict[str, Value]]
"""For a step, the settings that it and all later steps have, by `section.key`."""


def refuse_unknown(changes: Changes) -> None:
    """Raise ValueError for a setting that cannot change at a step."""
    for step, settings in changes.items():
        for key in settings:
            if key not in AT_A_STEP:
                raise ValueError(
                    f"run.changes, step {step}: {shortened(key)!r} cannot change at a step."
                    f"{nearest(key, AT_A_STEP)}"
                )


def changed_at(changes: Changes, step: int) -> dict[str, dict[str, Any]]:
    """The values by section that a step has by changes up to it.

    Args:
        changes: of the run.
        step: from 0.
    """
    changed: dict[str, dict[str, Any]] = {}
    for first in sorted(changes):
        if first <= step:
            for key, value in changes[first].items():
                section, name = key.split(".")
                changed.setdefault(section, {})[name] = value
    return changed
