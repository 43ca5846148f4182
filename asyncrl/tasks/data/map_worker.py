"""Runs `task.map`: `python -m asyncrl.tasks.data.map_worker PARENT STATUS PROCESSES`.

The user's function runs here, below a supervisor like reward functions, so that a hanging one can
be killed with everything that it started. Standard input is a file of frames: a `Load`, then one
example each. The process answers `Loaded` or `Refused`, and each example with `Mapped` or `Failed`,
in order. Import-light.
"""

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from asyncrl.errors import DataError
from asyncrl.user_code.loading import FunctionKind, load_function, search
from asyncrl.user_code.streams import MAX_FRAME, Refused, Streams, last_lines
from asyncrl.user_code.supervisor import supervise

MAP = FunctionKind("task.map", "function(example)", ({},), DataError)


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load this function."""

    name: str
    search_path: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The function can be called."""


class Mapped(msgspec.Struct, frozen=True, tag=True):
    """The function's result for one example; None leaves the example out."""

    values: dict[str, Any] | None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The function raised or returned an invalid value; `message` describes it."""

    message: str


Answer = Loaded | Refused | Mapped | Failed


def main() -> None:
    """Answer every example, in order."""
    parent, status, max_processes = map(int, sys.argv[1:])
    supervise(parent, status, max_processes)
    streams = Streams()
    load = msgspec.msgpack.decode(streams.read() or b"", type=Load)
    search(load.search_path)
    try:
        function = load_function(MAP, load.name, {})
    except DataError as error:
        streams.send(Refused(str(error)))
        return
    except (Exception, SystemExit):  # noqa: BLE001 - process edge: reported to the controller
        streams.send(Refused(f"task.map {load.name!r} cannot be imported:\n{last_lines()}"))
        return
    streams.send(Loaded())
    while (frame := streams.read()) is not None:
        streams.send(_apply(function, msgspec.msgpack.decode(frame)))


def _apply(function: Callable[..., Any], example: dict[str, Any]) -> Mapped | Failed:
    try:
        result = function(example)
        if result is not None and not isinstance(result, dict):
            return Failed(f"returned a {type(result).__name__}; it must return a dict or None")
        odd = next((key for key in result or () if not isinstance(key, str)), None)
        if odd is not None:
            return Failed(f"returned a dict with the key {odd!r}; the keys of an example are text")
        size = len(msgspec.msgpack.encode(result))
    except (Exception, SystemExit):  # noqa: BLE001 - process edge: reported to the controller
        return Failed(f"failed:\n{last_lines()}")
    if size >= MAX_FRAME // 2:
        return Failed(f"returned an example of {size >> 20} MiB")
    return Mapped(result)


if __name__ == "__main__":
    main()
