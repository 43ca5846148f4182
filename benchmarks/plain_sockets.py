"""Sockets without encryption, to measure what encryption costs. Nothing but benchmarks has them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq.asyncio


@contextmanager
def without_curve(*, enabled: bool) -> Iterator[None]:
    """Meanwhile, sockets that are made in this process ignore their CURVE keys, if `enabled`."""
    if not enabled:
        yield
        return
    whole = zmq.asyncio.Socket.__setattr__

    def set_attribute(socket: Any, name: str, value: Any) -> None:
        if not name.startswith("curve_"):
            whole(socket, name, value)

    zmq.asyncio.Socket.__setattr__ = set_attribute  # type: ignore[method-assign]
    try:
        yield
    finally:
        zmq.asyncio.Socket.__setattr__ = whole  # type: ignore[method-assign]
