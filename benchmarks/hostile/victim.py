"""The controller of the run under attack: `asyncrl run` with a key that the benchmark knows.

    python -m benchmarks.hostile.victim PARENT < ORDER

It ends with its parent, the benchmark, whose process id is PARENT.
With `garbage` above 0 the controller is faulty, too: after each of its messages to a process it
sends this many frames of nonsense, so that the processes' own lines are attacked as well.
"""

import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import zmq
from rich.console import Console

from asyncrl.config.run_config import load_config
from asyncrl.controller.execute import execute
from asyncrl.startup.prepare import prepare
from asyncrl.user_code.process_tree import end_with_parent
from asyncrl.wire import Hub, RunKey
from benchmarks.hostile.frames import Frames

CONTROLLER = "controller"


class Order(msgspec.Struct):
    """What to run, on standard input as JSON."""

    config: str
    settings: list[str]
    """As after `--set`."""
    key: bytes
    """32 bytes: the run key."""
    garbage: int = 0
    """Frames of nonsense after each message to a process."""


def add_garbage(count: int) -> None:
    """Have hubs send nonsense to the processes of the run, after each message."""
    send, frames = Hub.send, Frames(9, long=0)

    async def send_more(hub: Hub[Any], peer: str, message: msgspec.Struct) -> None:
        await send(hub, peer, message)
        if peer.partition("-")[0] not in ("trainer", "generator"):
            return
        for _ in range(count):
            parts = [hub._keys.identity_of(peer), frames.nonsense()]  # noqa: SLF001
            await hub._socket.send_multipart(parts, flags=zmq.NOBLOCK)  # noqa: SLF001

    Hub.send = send_more  # type: ignore[assignment,method-assign]


def main() -> None:
    end_with_parent(int(sys.argv[1]), signal.SIGTERM)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    if order.garbage:
        add_garbage(order.garbage)
    console = Console(width=200)
    prepared = prepare(load_config(Path(order.config), order.settings), console)
    execute(prepared, resume=False, clean=False, console=console, run_key=RunKey(order.key))


if __name__ == "__main__":
    main()
