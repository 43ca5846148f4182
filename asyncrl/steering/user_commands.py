"""Carries out, acknowledges and records (orders.jsonl) user orders that change a run.

    request ──► carried out ──► line of orders.jsonl ──► Accepted, with the step ──► user
    --resume ──► lines of orders.jsonl ──► the configuration that the run is resumed with

An order that cannot be carried out raises UserError; it changes nothing and is not recorded. Every
acknowledged order is on the disk, unless the disk is full, which the reply says.
"""

import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.config.run_config import RunConfig, parse_config
from asyncrl.config.yaml_text import parse_yaml
from asyncrl.errors import UserError
from asyncrl.monitoring.errors import RecordError
from asyncrl.monitoring.records.jsonl import JsonlWriter, read_undamaged
from asyncrl.mutability import AT_A_STEP
from asyncrl.wire.messages import control
from asyncrl.wire.messages.control import OrderRecord, Value

logger = logging.getLogger(__name__)

ORDERS = "orders.jsonl"
_MODE, _RUNAHEAD = "scheduler.on_update", "scheduler.max_runahead_groups"
"""A mode without verification does not run ahead, so an order of the first changes both."""
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
resumed run; the others apply once."""


class Effect(NamedTuple):
    """The effect of an order, in words that include its beginning."""

    text: str
    step: int | None = None
    """Number of trained steps when it takes effect; None: now."""
    before: Value | msgspec.UnsetType = msgspec.UNSET


class Orders:
    """Carries out orders and records them, unless `refusal` gives a reason."""

    def __init__(
        self, run: Path, trained_steps: Callable[[], int], refusal: Callable[[Order], str | None]
    ) -> None:
        self._path = run / ORDERS
        self._trained_steps = trained_steps
        self._refusal = refusal
        self._handlers: dict[type, Callable[[Any], Awaitable[str | Effect]]] = {}
        self._busy: set[type] = set()

    def add(self, kind: type[Any], carry_out: Callable[[Any], Awaitable[str | Effect]]) -> None:
        """Register a handler for a kind of order; it returns a description or raises UserError."""
        self._handlers[kind] = carry_out

    async def answer(self, order: Order) -> control.Reply:
        """Carry out an order, record it and acknowledge it; or say why not."""
        kind = type(order)
        if (reason := self._refusal(order)) is not None:
            return control.Refused(reason)
        if kind in self._busy and kind is not control.SetRequest:
            return control.Refused(
                f"another `{_name_of(kind)}` is being carried out; repeat the order when that one "
                "is answered"
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
        text = done.text if done.step is not None else f"{done.text} (from step {step} on)"
        record = OrderRecord(
            order=_name_of(type(order)),
            arguments=msgspec.structs.asdict(order),
            step=step,
            time=time.time(),  # noqa: TID251 - for people
            effect=done.text,
            before=done.before,
        )
        try:
            with contextlib.closing(JsonlWriter(self._path)) as writer:
                writer.append(record)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error.strerror)
            text += f"; a resumed run will not apply it, since {self._path} cannot be written"
        return control.Accepted(text, step)


def read_orders(run: Path) -> list[OrderRecord]:
    """Return the orders of a run, in order, without damaged lines."""
    return _read(run / ORDERS)[0]


def _read(path: Path) -> tuple[list[OrderRecord], list[RecordError]]:
    return read_undamaged(path, OrderRecord) if path.exists() else ([], [])


def with_orders(
    config: RunConfig, overrides: Sequence[str], say: Callable[[str], None] = logger.warning
) -> RunConfig:
    """Return the configuration of a resumed run: `config` with its orders in force.

    `overrides` are settings that the user has named again, `KEY=VALUE`. Such a value takes back the
    orders of its setting, unless an order has replaced exactly this value: then the user repeats
    the command that the run began with. `say` reports orders that are taken back or cannot be read.
    Raises UserError if the orders cannot be read.
    """
    path = config.directory / ORDERS
    try:
        records, damaged = _read(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}). It holds orders that stay in force, such "
            "as `asyncrl set`: make it readable, or move it away to continue without them"
        ) from error
    for one in damaged:
        say(f"{one}: the order of this line is left out")
    replay = _Replay(config, {one.partition("=")[0].strip() for one in overrides}, say)
    for record in records:
        if record.order == "scale":
            replay.scale(record)
        elif record.order == "set":
            replay.set(record)
    return parse_config(replay.values(), source=f"the orders in {path}")


def last_scale(run: Path) -> int | None:
    """Return the number of generators in the last such order, or None."""
    numbers = [int(one.arguments["generators"]) for one in read_orders(run) if one.order == "scale"]
    return numbers[-1] if numbers else None


class _Replay:
    """Applies the orders of a run to a configuration again, except for `named` settings."""

    def __init__(self, config: RunConfig, named: set[str], say: Callable[[str], None]) -> None:
        self._given = config.model_dump(mode="json")
        self._values = config.model_dump(mode="json")
        self._changes = {step: dict(settings) for step, settings in config.run.changes.items()}
        self._named = named
        self._say = say
        self._before: dict[str, list[Value]] = {}
        self._most: int | None = None
        """The last ordered number of generators, with agents, which come and go."""

    def values(self) -> dict[str, Any]:
        """Return the configuration with the orders so far."""
        changes = {step: settings for step, settings in self._changes.items() if settings}
        self._values["run"]["changes"] = changes
        launcher = self._values["launcher"]
        if self._most is not None and self._most < launcher["generators"]:
            self._say(f"the last `asyncrl scale` allows {self._most} generator(s): no more begin")
            launcher["generators"] = self._most
        return self._values

    def scale(self, record: OrderRecord) -> None:
        """Apply a number of generators. With agents it is an upper bound."""
        generators = int(record.arguments["generators"])
        if self._values["launcher"]["kind"] == "agents":
            self._most = generators
        elif self._holds(record, "launcher.generators", f"scale --generators {generators}"):
            self._values["launcher"]["generators"] = generators

    def set(self, record: OrderRecord) -> None:
        """Apply a setting from the step on from which it was in force."""
        key, text = str(record.arguments["key"]).strip(), str(record.arguments["value"])
        value = parse_yaml(text, source=f"the value of {key}")
        holds = self._holds(record, key, f"set {key}={text}")
        if key not in AT_A_STEP:
            section, name = key.split(".")
            if holds:
                self._values[section][name] = value
            return
        changed = self._changes.setdefault(record.step, {})
        if holds:
            changed[key] = value
            if key == _MODE and value != "verify":
                changed[_RUNAHEAD] = None
            return
        changed.pop(key, None)
        if key == _MODE and changed.get(_RUNAHEAD, 0) is None:
            del changed[_RUNAHEAD]

    def _holds(self, record: OrderRecord, key: str, words: str) -> bool:
        if record.before is not msgspec.UNSET:
            self._before.setdefault(key, []).append(record.before)
        order = f"the order `asyncrl {words}` of step {record.step}"
        if "run.changes" in self._named and record.order == "set":
            self._say(f"{order} is taken back: --set names run.changes")
            return False
        if key not in self._named:
            return True
        section, name = key.split(".")
        given = self._given[section][name]
        if given in self._before.get(key, ()):
            self._say(f"{order} stays in force: --set {key} names a value from before it")
            return True
        self._say(f"{order} is taken back: --set {key} names another value")
        return False


def _name_of(kind: type) -> str:
    """Return the name of a request: `ScaleRequest` is `scale`."""
    words = kind.__name__.removesuffix("Request")
    return re.sub(r"(?<!^)([A-Z])", r"-\1", words).lower()
