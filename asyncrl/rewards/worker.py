"""A reward worker: `python -m asyncrl.rewards.worker PARENT STATUS PROCESSES`.

The user's functions run here, below a supervisor (`asyncrl.rewards.supervisor`): one that hangs can
be killed with all that it has started, and one that crashes takes nothing with it. Calls queue up
in the worker's input. They are answered one after the other, or, if a function is async, run
concurrently in one event loop. The functions' own output goes to the supervisor; the frames have
descriptors of their own. The module is import-light (no torch, no pydantic), so a killed worker is
replaced in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from asyncrl.cores import stay_on_helper_cores
from asyncrl.errors import RewardError
from asyncrl.rewards import protocol
from asyncrl.rewards.scoring import LoadedTerm, finish, last_lines, score
from asyncrl.rewards.supervisor import supervise

_OOM_SCORE_ADJUSTMENT = 500
"""Of -1000 to 1000; processes that the functions start inherit it."""


class Streams:
    """The worker's ends of the frame streams, out of reach of the user's print and input."""

    def __init__(self) -> None:
        self._inbox = os.fdopen(os.dup(0), "rb")
        self._outbox: BinaryIO = os.fdopen(os.dup(1), "wb")
        self._decoder = msgspec.msgpack.Decoder(protocol.ToWorker)
        self._process = os.getpid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)

    def read(self) -> protocol.ToWorker | None:
        """The next message, None at the end of the stream."""
        try:
            length = protocol.body_length(self._inbox.read(protocol.HEAD_BYTES))
        except EOFError:
            return None
        body = self._inbox.read(length)
        return self._decoder.decode(body) if len(body) == length else None

    def send(self, message: protocol.FromWorker) -> None:
        """Send a message. A fork of this process that a function has returned from ends here."""
        if os.getpid() != self._process:
            os._exit(0)
        self._outbox.write(protocol.pack(message))
        self._outbox.flush()


def main() -> None:
    """Serve until standard input ends."""
    parent, status, max_processes = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash must not fill the disk
    stay_on_helper_cores()
    supervise(parent, status, max_processes)
    _be_the_first_to_run_out_of_memory()
    streams = Streams()
    setup = streams.read()
    if not isinstance(setup, protocol.Setup):
        return
    sys.path.insert(0, setup.search_path)
    try:
        terms = [LoadedTerm.load(term) for term in setup.terms]
    except RewardError as error:
        streams.send(protocol.Refused(str(error)))
        return
    except (Exception, SystemExit):  # noqa: BLE001 - process edge: reported to the pool
        names = ", ".join(term.name for term in setup.terms)
        streams.send(protocol.Refused(f"loading the rewards ({names}) failed:\n{last_lines()}"))
        return
    asynchronous = any(term.asynchronous for term in terms)
    streams.send(protocol.Ready(asynchronous))
    if asynchronous:
        from asyncrl.rewards.concurrent_calls import serve_concurrently

        serve_concurrently(streams.read, streams.send, terms, setup.timeout_seconds)
        return
    while isinstance(message := streams.read(), protocol.Call):
        streams.send(finish(score(message, terms, streams.send)))


def _be_the_first_to_run_out_of_memory() -> None:
    """Have the kernel kill reward functions for memory before the engine or the trainer."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE_ADJUSTMENT))


if __name__ == "__main__":
    main()
