"""A group of processes for broadcasts, apart from every other group of torch.distributed.

No default group is needed or touched: vLLM, SGLang and a sharded trainer have their own. Rank 0
sends. Gloo works on CPUs and is tested. **NCCL has never run here**: it is written after torch's
interface and tested against a stand-in of it (`tests/wire/test_nccl_group.py`).
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from asyncrl.wire.errors import GroupBroken
from asyncrl.wire.transport.environment import kept_variable

logger = logging.getLogger(__name__)

Backend = Literal["gloo", "nccl"]

_CPU = torch.device("cpu")
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NONBLOCKING_TIMEOUT = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
_POLL_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest waits in seconds; their sum leaves time to read the file within a call (120 s)."""

    window: float = 2.0
    """Wait for the expected members, after the first has come."""
    answer: float = 30.0
    """Wait of a member for the beginning of its broadcast, while another one is running."""
    form: float = 20.0
    chunk: float = 10.0
    whole: float = 45.0
    """Wait for all chunks together, checked after each, so that a member that takes each of them
    slowly delays the others no longer."""


class Deadline:
    """The end of a broadcast's time, `limits.whole` from now."""

    def __init__(self, limits: Limits) -> None:
        self._seconds = limits.whole
        self._at = time.monotonic() + limits.whole

    def check(self, index: int, count: int) -> None:
        """Raise GroupBroken if it has passed, after `index` of `count` chunks."""
        if time.monotonic() > self._at:
            raise GroupBroken(
                f"a member is slow: {index} of {count} chunks took more than {self._seconds:g} s"
            )


class Group(Protocol):
    """The connected members. All of them make the same calls in the same order."""

    device: torch.device

    def begin(self, part: Tensor) -> None:
        """Begin to send, as rank 0, or to receive. The tensor must stay until that has ended."""

    def wait(self, left: int = 0) -> None:
        """Wait until at most `left` operations have not ended. Raises GroupBroken."""

    def close(self) -> None:
        """End the group, also for members that wait in it. Idempotent."""


def backend_of(devices: Sequence[str]) -> Backend:
    """Return NCCL if each member has its own GPU; it refuses two members on one GPU."""
    gpus = {device for device in devices if device != "cpu"}
    return "nccl" if len(gpus) == len(devices) else "gloo"


def name_of_device(device: torch.device) -> str:
    """Return the name of a device, as in `CheckIn.device`."""
    if device.type != "cuda":
        return "cpu"
    return str(torch.cuda.get_device_properties(device).uuid)


class GlooGroup:
    """A group of `size` members over TCP, in host memory; rank 0 sends.

    They meet in `store`; this one listens at `host`. Raises GroupBroken if not all came in time.
    """

    device = _CPU

    def __init__(self, store: Any, rank: int, size: int, host: str, limits: Limits) -> None:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        options._threads = 1  # noqa: SLF001 - they keep their order
        options._timeout = timedelta(seconds=limits.form)  # noqa: SLF001
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
        with breaking("the members could not connect"):
            self._gloo: Any = ProcessGroupGloo(store, rank, size, options)
            self._gloo.set_timeout(timedelta(seconds=limits.chunk))
        self._begun: deque[Any] = deque()

    def begin(self, part: Tensor) -> None:
        """See `Group.begin`."""
        with breaking("a broadcast could not begin"):
            self._begun.append(self._gloo.broadcast(part, 0))

    def wait(self, left: int = 0) -> None:
        """See `Group.wait`."""
        with breaking("a broadcast did not end"):
            while len(self._begun) > left:
                self._begun.popleft().wait()

    def close(self) -> None:
        """See `Group.close`."""
        if self._gloo is not None:
            self._gloo.abort()
        # Its connections close when nothing refers to them, not even a tensor on its way.
        self._begun.clear()
        self._gloo = None


class NcclGroup:
    """A group between GPUs, made as `GlooGroup`. **Never run.**

    Its collectives never end if a member has died; so they are polled, and the communicator is
    aborted. NCCL's watchdog, which would end the process, is disabled. It is made in three steps:
    the object, alone; the communicator, in the first broadcast, for which torch waits up to 30 min
    for missing members, unless the environment says otherwise; and that broadcast. After `close`
    nothing may be begun. Raises GroupBroken if not all came in time.
    """

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, limits: Limits
    ) -> None:
        from torch.distributed import ProcessGroupNCCL

        self.device = device
        self._limits = limits
        self._stream = torch.cuda.Stream(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=limits.form)  # noqa: SLF001
        options.config.blocking = 0  # so that forming it can be given up
        # Torch reads it once per process, at the first communicator of this kind.
        os.environ.setdefault(_NONBLOCKING_TIMEOUT, str(math.ceil(limits.form)))
        # Without the watchdog, a collective that fails does not end the process.
        with breaking("the members could not connect"), kept_variable(_ERROR_HANDLING, "0"):
            self._nccl: Any = ProcessGroupNCCL(store, rank, size, options)
        self._begun: deque[tuple[Any, Tensor]] = deque()
        """Operations with their tensors, whose memory must not be freed before."""
        try:
            began = time.monotonic()
            self.begin(torch.zeros(1, dtype=torch.uint8, device=device))
            # Connected with the first broadcast.
            self._wait(0, max(_POLL_SECONDS, began + limits.form - time.monotonic()))
        except BaseException:
            self.close()
            raise

    def begin(self, part: Tensor) -> None:
        """See `Group.begin`."""
        if self._nccl is None:
            raise GroupBroken("a broadcast could not begin: it was closed")
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with breaking("a broadcast could not begin"), torch.cuda.stream(self._stream):
            self._begun.append((self._nccl.broadcast(part, 0), part))

    def wait(self, left: int = 0) -> None:
        """See `Group.wait`."""
        self._wait(left, self._limits.chunk)

    def close(self) -> None:
        """See `Group.close`."""
        nccl, self._nccl = self._nccl, None
        if nccl is not None:
            try:
                nccl.abort()
            except RuntimeError as error:  # the original error counts
                logger.warning("NCCL could not be aborted: %s", error)
        self._begun.clear()

    def _wait(self, left: int, seconds: float) -> None:
        while len(self._begun) > left:
            deadline = time.monotonic() + seconds
            with breaking("a broadcast did not end"):
                work, _ = self._begun[0]
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise GroupBroken(f"a broadcast did not end within {seconds:g} s")
                    time.sleep(_POLL_SECONDS)
                # `is_success` of NCCL's work only raises NotImplementedError.
                error = work.exception()
                if error is not None:
                    first = next(iter(str(error).splitlines()), "")
                    raise GroupBroken(f"a broadcast failed: {first}") from error
                work.wait()  # It is complete, so this returns at once and torch frees the tensor.
            self._begun.popleft()


@contextmanager
def breaking(what: str) -> Iterator[None]:
    """Raise GroupBroken, which begins with this clause, for an error of torch in the block."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError and Gloo's are of this kind
        first = next(iter(str(error).splitlines()), "")
        raise GroupBroken(f"{what}: {first}") from error
