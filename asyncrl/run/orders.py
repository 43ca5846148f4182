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
from typing import Any

import msgspec

from asyncrl.config import RunConfig, parse_config
from asyncrl.errors import UserError
from monitoring.jsonl import JsonlWriter, read_undamaged
from wire.messages import control
from wire.orders import OrderRecord

logger = logging.getLogger(__name__)

ORDERS = "orders.jsonl"
Order = control.ScaleRequest
"""Requests that are recorded. Others (status, stop) change nothing that a resumed run repeats."""


class Orders:
    """Carries out orders and records them.

    Args:
        run: the run's folder.
        trained_steps: how many steps the run has trained.
        refusal: why no order can be carried out now; None if orders can.
    """

    def __init__(
        self, run: Path, trained_steps: Callable[[], int], refusal: Callable[[], str | None]
    ) -> None:
        self._path = run / ORDERS
        self._trained_steps = trained_steps
        self._refusal = refusal
        self._handlers: dict[type, Callable[[Any], Awaitable[str]]] = {}

    def add(self, kind: type[Order], carry_out: Callable[[Any], Awaitable[str]]) -> None:
        """Have orders of a kind carried out by this; it says what happens, or raises UserError."""
        self._handlers[kind] = carry_out

    async def answer(self, order: Order) -> control.Reply:
        """Carry out an order, record it and acknowledge it; or say why not."""
        if (reason := self._refusal()) is not None:
            return control.Refused(reason)
        try:
            effect = await self._handlers[type(order)](order)
        except UserError as error:
            return control.Refused(str(error))
        step = self._trained_steps()
        record = OrderRecord(
            order=_name_of(type(order)),
            arguments=msgspec.structs.asdict(order),
            step=step,
            time=time.time(),
            effect=effect,
        )
        try:
            _append(self._path, record)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error.strerror)
            effect += f"; a resumed run will not know it, since {self._path} cannot be written"
        return control.Accepted(f"{effect} (from step {step} on)", step)


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
    named = {one.partition("=")[0] for one in overrides}
    values = config.model_dump(mode="json")
    for record in read_orders(config.directory):
        if record.order == "scale" and "launcher.generators" not in named:
            values["launcher"]["generators"] = record.arguments["generators"]
    return parse_config(values, source=f"the orders in {config.directory / ORDERS}")


def last_scale(run: Path, generators: int) -> int | None:
    """The number of generators that was ordered last, if it is the one that the run has."""
    numbers = [int(one.arguments["generators"]) for one in read_orders(run) if one.order == "scale"]
    return numbers[-1] if numbers and numbers[-1] == generators else None


def _name_of(kind: type) -> str:
    """`ScaleRequest` is `scale`."""
    words = kind.__name__.removesuffix("Request")
    return re.sub(r"(?<!^)([A-Z])", r"-\1", words).lower()


def _append(path: Path, record: OrderRecord) -> None:
    """Append one line. Raises OSError."""
    with contextlib.closing(JsonlWriter(path)) as writer:
        writer.append([record])
