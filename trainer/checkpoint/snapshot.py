"""A copy of the training state in host memory, made while training continues.

    take ──► thread: device to host ──► `copied`: weights may change ──► written ──► `take` again

Weights and moments change in an optimizer step only, so training waits for a copy only before the
next one (`wait`). The buffers take as much host memory as this rank's part of the state (12 bytes a
parameter, divided by the ranks) and are reused: touching fresh pages costs more than the copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.trainer.checkpoint.format.tensors import Held
from asyncrl.trainer.model.host_memory import memory_left


class Snapshot:
    """Copies what a rank holds; one at a time, into reused buffers."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.Size], Tensor] = {}
        self._copying: threading.Thread | None = None
        self._error: BaseException | None = None

    def take(self, held: Sequence[Held]) -> list[Held]:
        """Begin to copy, once an earlier copy is done; the tensors are filled after `wait`."""
        self._join()
        buffers = {_key(one): self._buffers.get(_key(one)) for one in held}
        self._buffers = {}  # free what no longer fits first
        for one in held:
            kept = buffers[_key(one)]
            if kept is None:
                like = one.local
                kept = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[_key(one)] = kept
        copies = [
            replace(one, box=replace(one.box, local=self._buffers[_key(one)])) for one in held
        ]
        streams = _side_streams(held)
        self._error = None
        self._copying = threading.Thread(
            target=self._copy, args=(held, copies, streams), name="snapshot", daemon=True
        )
        self._copying.start()
        return copies

    def needed(self, held: Sequence[Held]) -> int:
        """Bytes of additional host memory that a copy takes.

        Torch rounds page-locked memory, used for a GPU's tensors, up to powers of two.
        """
        new = [one.local for one in held if _key(one) not in self._buffers]
        return sum(
            1 << (one.nbytes - 1).bit_length() if one.is_cuda and one.nbytes else one.nbytes
            for one in new
        )

    @staticmethod
    def lacks(needed: int) -> str:
        """Explain if this machine or container lacks memory for this many bytes; else return ""."""
        left = memory_left()
        if left is None or needed <= left:
            return ""
        return (
            f"a copy of the training state takes {needed} bytes of this machine's memory, and "
            f"{left} are left"
        )

    def wait(self) -> float:
        """Wait until everything is copied; return the seconds. Raises what the copy raised."""
        began = time.monotonic()
        self._join()
        if self._error is not None:  # for both waiters: training and the writer
            raise self._error
        return time.monotonic() - began

    def _join(self) -> None:
        if (thread := self._copying) is not None:
            thread.join()
            self._copying = None

    def _copy(
        self,
        held: Sequence[Held],
        copies: Sequence[Held],
        streams: dict[torch.device, torch.cuda.Stream],
    ) -> None:
        try:
            with torch.no_grad():
                for one, copy in zip(held, copies, strict=True):
                    _copy_one(one.local, copy.local, streams.get(one.local.device))
            for stream in streams.values():
                stream.synchronize()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error


def _key(one: Held) -> tuple[str, torch.dtype, torch.Size]:
    return one.name, one.local.dtype, one.local.shape


def _side_streams(held: Sequence[Held]) -> dict[torch.device, torch.cuda.Stream]:
    """Create a stream for each GPU, behind what is queued there."""
    streams = {}
    for device in {one.local.device for one in held if one.local.is_cuda}:
        streams[device] = torch.cuda.Stream(device)
        streams[device].wait_stream(torch.cuda.current_stream(device))
    return streams


def _copy_one(source: Tensor, target: Tensor, stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
    elif source.is_contiguous():
        # One thread, without the interpreter's lock; torch would take all cores from training.
        np.copyto(_bytes_of(target), _bytes_of(source))
    else:
        target.copy_(source)


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    data: NDArray[np.uint8] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return data
