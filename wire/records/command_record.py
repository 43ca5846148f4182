"""The record of an order that a user gave to a run."""

from __future__ import annotations

import msgspec

Value = bool | int | float | str | None


class OrderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An order of the user that changed a run: a line of orders.jsonl."""

    order: str
    """Its name on the command line: `scale`."""
    arguments: dict[str, bool | int | float | str]
    step: int
    """Steps trained when it took effect: the step of this number is the first one with it."""
    time: float
    """Unix time, in seconds."""
    effect: str
    before: Value | msgspec.UnsetType = msgspec.UNSET
    """The configured value without this `set` or `scale`. A resume that names this value again
    repeats an old command, and does not take the order back."""
