"""The record of an order that a user gave to a run."""

from __future__ import annotations

import msgspec

Value = bool | int | float | str | None


class OrderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An order of the user that changed a run: a line of orders.jsonl."""

    order: str
    """Its name on the command line: `scale`."""
    arguments: dict[str, bool | int | float | str]
    """Of the order, such as `{"generators": 3}`."""
    step: int
    """Steps that were trained when it took effect: the step of this number is the first one with
    it."""
    time: float
    """When it was given, in seconds since 1970."""
    effect: str
    """What the user was told."""
    before: Value | msgspec.UnsetType = msgspec.UNSET
    """Of `set` and `scale`: what the configuration says without the order. Whoever names this value
    again on a resume repeats an old command, and does not take the order back."""
