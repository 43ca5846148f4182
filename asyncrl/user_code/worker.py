"""A pool's worker process, from the inside: `python -m MODULE PARENT STATUS PROCESSES`.

The user's code runs here, below a supervisor (`user_code.supervisor`): a process that hangs can be
killed with all processes that it has started, and one that crashes harms no other. The user's
output goes to the supervisor; frames have separate descriptors. Import-light (no torch, no
pydantic), so that a killed worker is replaced in a fraction of a second.
"""

import contextlib
import resource
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from asyncrl.cores import stay_on_helper_cores
from asyncrl.errors import RewardError
from asyncrl.user_code.loading import search
from asyncrl.user_code.streams import Refused, Streams, last_lines
from asyncrl.user_code.supervisor import supervise

T = TypeVar("T")

_OOM_SCORE_ADJUSTMENT = 500
"""The range is -1000 to 1000; processes that the user's code starts inherit it."""


class Channel:
    """Forks below a supervisor; in the worker, the connection with `incoming` messages."""

    def __init__(self, incoming: Any) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash must not fill the disk
        stay_on_helper_cores()
        supervise(*map(int, sys.argv[1:]))
        with contextlib.suppress(OSError):  # the kernel kills it before the engine or the trainer
            Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE_ADJUSTMENT))
        self._streams = Streams()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(incoming)
        self.send: Callable[[object], None] = self._streams.send

    def read(self) -> Any:
        """Wait for the next message; None at the end of the stream."""
        frame = self._streams.read()
        return None if frame is None else self._decoder.decode(frame)

    def load(self, search_path: str, what: str, load: Callable[[], T]) -> T | None:
        """Load the user's code by calling `load`; on failure report to the pool and return None.

        Modules are also imported from `search_path`; `what` names the code in the report.
        """
        search(search_path)
        try:
            return load()
        except RewardError as error:
            self.send(Refused(str(error)))
        except (Exception, SystemExit):  # noqa: BLE001 - process edge: reported to the pool
            self.send(Refused(f"loading {what} failed:\n{last_lines()}"))
        return None

    async def messages(self) -> AsyncIterator[Any]:
        """Yield the messages as they arrive, up to the end of the stream."""
        import asyncio  # a third of the start of a worker that needs no event loop

        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Any] = asyncio.Queue()

        def receive() -> None:
            while True:
                message = self.read()
                loop.call_soon_threadsafe(arrived.put_nowait, message)
                if message is None:
                    return

        # A daemon: the process ends although it is still reading.
        threading.Thread(target=receive, name="asyncrl-calls", daemon=True).start()
        while (message := await arrived.get()) is not None:
            yield message
