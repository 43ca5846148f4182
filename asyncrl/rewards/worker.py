"""A reward worker: `python -m asyncrl.rewards.worker`, started by `RewardPool`.

The user's functions run here: one that hangs can be killed, and one that crashes takes nothing
with it. Calls queue up in the worker's input and are answered one after the other. The functions'
own output goes to standard error; the frames have a descriptor of their own. The module is
import-light (no torch, no pydantic), so a killed worker is replaced in a fraction of a second.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
import traceback
from typing import Any, BinaryIO

import msgspec

from asyncrl.cores import stay_on_helper_cores
from asyncrl.errors import RewardError
from asyncrl.rewards import protocol
from asyncrl.rewards.examples import argument_for, wants_row
from asyncrl.rewards.functions import RewardFunction
from asyncrl.rewards.loading import load_function

TRACEBACK_LINES = 8
"""Lines of the user's traceback that an error message quotes."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until standard input ends."""
    _die_with_parent()
    stay_on_helper_cores()
    inbox, outbox = _private_streams()
    decoder = msgspec.msgpack.Decoder(protocol.ToWorker)
    setup = _read(inbox, decoder)
    if not isinstance(setup, protocol.Setup):
        return
    sys.path.insert(0, setup.search_path)
    try:
        functions = [load_function(term.name, term.args) for term in setup.terms]
    except RewardError as error:
        _send(outbox, protocol.Refused(str(error)))
        return
    except (Exception, SystemExit):  # noqa: BLE001 - process edge: reported to the pool
        names = ", ".join(term.name for term in setup.terms)
        _send(outbox, protocol.Refused(f"loading the rewards ({names}) failed:\n{_last_lines()}"))
        return
    _send(outbox, protocol.Ready())
    while (message := _read(inbox, decoder)) is not None:
        if isinstance(message, protocol.Call):
            _send(outbox, _score(message, setup.terms, functions, outbox))


def _score(
    call: protocol.Call,
    terms: tuple[protocol.Term, ...],
    functions: list[RewardFunction],
    outbox: BinaryIO,
) -> protocol.Scored | protocol.Raised:
    total, began = 0.0, time.perf_counter()
    for index, (term, function) in enumerate(zip(terms, functions, strict=True)):
        _send(outbox, protocol.Began(index))
        try:
            example = argument_for(call.example, row_only=wants_row(function))
            result = function(call.prompt, call.response, example, **term.args)
            total += term.weight * _finite(result)
        except (Exception, SystemExit):  # noqa: BLE001 - process edge: reported to the pool
            return protocol.Raised(index, _last_lines())
    return protocol.Scored(total, time.perf_counter() - began)


def _finite(result: Any) -> float:
    """Any number as a float, numpy scalars and 0-d tensors too. Raises TypeError or ValueError."""
    if isinstance(result, str | bytes) or not hasattr(result, "__float__"):
        raise TypeError(f"a reward must return a number, got {type(result).__name__}: {result!r}")
    value = float(result)
    if not math.isfinite(value):
        raise ValueError(f"a reward must return a finite number, got {value}")
    return value


def _last_lines() -> str:
    lines = traceback.format_exc().strip().splitlines()
    return "\n".join(lines[-TRACEBACK_LINES:])


def _private_streams() -> tuple[BinaryIO, BinaryIO]:
    """Move the frame streams to private descriptors, out of reach of the user's print and input."""
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return inbox, outbox


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends.

    A parent killed by SIGKILL closes our input, but a hanging function never reads that.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _read(
    inbox: BinaryIO, decoder: msgspec.msgpack.Decoder[protocol.ToWorker]
) -> protocol.ToWorker | None:
    """The next message, None at the end of the stream."""
    try:
        length = protocol.body_length(inbox.read(protocol.HEAD_BYTES))
    except EOFError:
        return None
    body = inbox.read(length)
    return decoder.decode(body) if len(body) == length else None


def _send(outbox: BinaryIO, message: protocol.FromWorker) -> None:
    outbox.write(protocol.pack(message))
    outbox.flush()


if __name__ == "__main__":
    main()
