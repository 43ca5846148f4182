"""Runs `task.map`: `python -m asyncrl.tasks.map_worker PARENT STATUS PROCESSES`.

The user's function runs here, below a supervisor as reward functions do, so that one that hangs can
be killed with all that it has started. Standard input is a file with every example.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from asyncrl.errors import DataError
from asyncrl.rewards.scoring import last_lines
from asyncrl.rewards.supervisor import supervise
from asyncrl.tasks import map_messages
from asyncrl.tasks.map_messages import Answer, Failed, Load, Loaded, Mapped, Refused
from asyncrl.user_functions import load_function


def main() -> None:
    """Answer every example, in order."""
    parent, status, max_processes = map(int, sys.argv[1:])
    supervise(parent, status, max_processes)
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # the function's own output goes to the supervisor

    def answer(message: Answer) -> None:
        map_messages.write_frame(outbox, message)
        outbox.flush()

    load = msgspec.msgpack.decode(map_messages.read_frame(inbox) or b"", type=Load)
    sys.path.insert(0, load.search_path)
    try:
        function = load_function(map_messages.MAP, load.name, {})
    except DataError as error:
        answer(Refused(str(error)))
        return
    except (Exception, SystemExit):  # noqa: BLE001 - process edge: reported to the controller
        answer(Refused(f"task.map {load.name!r} cannot be imported:\n{last_lines()}"))
        return
    answer(Loaded())
    while (frame := map_messages.read_frame(inbox)) is not None:
        answer(_apply(function, msgspec.msgpack.decode(frame)))


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
    if size >= map_messages.MAX_FRAME // 2:
        return Failed(f"returned an example of {size >> 20} MiB")
    return Mapped(result)


if __name__ == "__main__":
    main()
