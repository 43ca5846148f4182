"""Orders of the user that change a run: carried out, acknowledged and recorded in orders.jsonl.

    request ──► carried out ──► line of orders.jsonl ──► Accepted, with the step ──► user
    --resume ──► lines of orders.jsonl ──► the configuration that the run is resumed with

An order that cannot be carried out raises UserError; it changes nothing and is not recorded. Every
order that is acknowledged is on the disk, unless the disk is full, which is said.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.changes import AT_A_STEP, Value
from asyncrl.config import RunConfig, parse_config
from asyncrl.errors import UserError
from asyncrl.yaml_text import parse_yaml
from monitoring.jsonl import JsonlWriter, read_undamaged
from wire.messages import control
from wire.orders import OrderRecord

logger = logging.getLogger(__name__)

ORDERS = "orders.jsonl"
Order = (
    control.PauseRequest
    | control.ResumeRequest
    | control.DrainRequest
    | control.CheckpointRequest
    | control.StopRequest
    | control.ScaleRequest
    | control.SetRequest
)
"""Requests that are recorded: all that change something. `scale` and `set` stay in force in a
resumed run; the others are done once."""


class Effect(NamedTuple):
    """What an order does, in words that say from when on."""

    text: str
    step: int | None = None
    """Trained steps when it takes effect; None: as many as are trained now."""


class Orders:
    """Carries out orders and records them.

    Args:
        run: the run's folder.
        trained_steps: how many steps the run has trained.
        refusal: why this order cannot be carried out now; None if it can.
    """

    def __init__(
        self, run: Path, trained_steps: Callable[[], int], refusal: Callable[[Order], str | None]
    ) -> None:
        self._path = run / ORDERS
        self._trained_steps = trained_steps
        self._refusal = refusal
        self._handlers: dict[type, Callable[[Any], Awaitable[str | Effect]]] = {}
        self._busy: set[type] = set()

    def add(self, kind: type[Any], carry_out: Callable[[Any], Awaitable[str | Effect]]) -> None:
        """Have orders of a kind carried out by this; it says what happens, or raises UserError."""
        self._handlers[kind] = carry_out

    async def answer(self, order: Order) -> control.Reply:
        """Carry out an order, record it and acknowledge it; or say why not."""
        kind = type(order)
        if (reason := self._refusal(order)) is not None:
            return control.Refused(reason)
        if kind in self._busy and kind is not control.SetRequest:
            return control.Refused(
                f"another `{_name_of(kind)}` is being carried out; give this one when that has "
                "been answered"
            )
        self._busy.add(kind)
        try:
            effect = await self._handlers[kind](order)
        except UserError as error:
            return control.Refused(str(error))
        finally:
            self._busy.discard(kind)
        return self._acknowledge(order, effect)

    def _acknowledge(self, order: Order, effect: str | Effect) -> control.Accepted:
        done = effect if isinstance(effect, Effect) else Effect(effect)
        step = self._trained_steps() if done.step is None else done.step
        text = done.text if isinstance(effect, Effect) else f"{effect} (from step {step} on)"
        record = OrderRecord(
            order=_name_of(type(order)),
            arguments=msgspec.structs.asdict(order),
            step=step,
            time=time.time(),
            effect=done.text,
        )
        try:
            _append(self._path, record)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error.strerror)
            text += f"; a resumed run will not know it, since {self._path} cannot be written"
        return control.Accepted(text, step)


def read_orders(run: Path) -> list[OrderRecord]:
    """The orders of a run, in the order in which they were given. Damaged lines are left out."""
    path = run / ORDERS
    return read_undamaged(path, OrderRecord)[0] if path.exists() else []


def with_orders(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The configuration with which a run is resumed: its orders stay in force.

    Args:
        config: as it was given.
        overrides: settings that the user has named again, which win: `KEY=VALUE`.
    """
    named = {one.partition("=")[0].strip() for one in overrides}
    values = config.model_dump(mode="json")
    changes = {step: dict(settings) for step, settings in config.run.changes.items()}
    for record in read_orders(config.directory):
        if record.order == "scale" and "launcher.generators" not in named:
            values["launcher"]["generators"] = record.arguments["generators"]
        elif record.order == "set" and "run.changes" not in named:
            _change_again(record, values, changes, is_named=record.arguments["key"] in named)
    values["run"]["changes"] = {step: settings for step, settings in changes.items() if settings}
    return parse_config(values, source=f"the orders in {config.directory / ORDERS}")


def last_scale(run: Path, generators: int) -> int | None:
    """The number of generators that was ordered last, if it is the one that the run has."""
    numbers = [int(one.arguments["generators"]) for one in read_orders(run) if one.order == "scale"]
    return numbers[-1] if numbers and numbers[-1] == generators else None


def _change_again(
    record: OrderRecord,
    values: dict[str, Any],
    changes: dict[int, dict[str, Value]],
    *,
    is_named: bool,
) -> None:
    """Have a setting that was ordered in force again, from the step from which it was.

    Args:
        record: the order.
        values: the configuration, changed.
        changes: its `run.changes`, changed.
        is_named: whether the user has named the setting again, so that the order does not count.
            The configuration may be the run's own copy, which has the order as well.
    """
    key, text = str(record.arguments["key"]), str(record.arguments["value"])
    value = parse_yaml(text, source=f"the value of {key}")
    if key not in AT_A_STEP:
        section, name = key.split(".")
        if not is_named:
            values[section][name] = value
    elif is_named:
        changes.get(record.step, {}).pop(key, None)
    else:
        changes.setdefault(record.step, {})[key] = value
        if key == "scheduler.on_update" and value != "verify":
            changes[record.step]["scheduler.max_runahead_groups"] = None


def _name_of(kind: type) -> str:
    """`ScaleRequest` is `scale`."""
    words = kind.__name__.removesuffix("Request")
    return re.sub(r"(?<!^)([A-Z])", r"-\1", words).lower()


def _append(path: Path, record: OrderRecord) -> None:
    """Append one line. Raises OSError."""
    with contextlib.closing(JsonlWriter(path)) as writer:
        writer.append([record])
