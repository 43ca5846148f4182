"""Notices that the head is silent, or that this machine is no node of the cluster any more."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

HEAD_SECONDS = 15.0
"""A head that has been silent for this long is lost."""
_POLL_SECONDS = 0.5


def watch(
    ask: Callable[[], bool],
    address: str,
    lost: Callable[[str, bool], None],
    *,
    seconds: float = HEAD_SECONDS,
) -> None:
    """Wait until the cluster is lost, and say why, once. Asking may block for ever.

    Ray ends the processes of a driver whose node is gone and starts no others for it, but it tells
    the driver nothing.

    Args:
        ask: the head, whether this machine is one of its nodes; raises if there is no answer.
        address: of the head.
        lost: told the reason, and whether Ray has ended the run's processes.
        seconds: without an answer until the head is lost.
    """
    heard = [time.monotonic()]
    is_out = threading.Event()

    def keep_asking() -> None:
        while not is_out.is_set():
            with contextlib.suppress(Exception):  # one failure is no loss
                if not ask():
                    is_out.set()
                heard[0] = time.monotonic()
            is_out.wait(seconds / 5)

    threading.Thread(target=keep_asking, daemon=True).start()
    while time.monotonic() - heard[0] < seconds:
        if is_out.wait(_POLL_SECONDS):
            lost(
                f"this machine's node has left the Ray cluster at {address}: its raylet ended, or "
                "the head took it for dead, and Ray ended the run's processes. Start Ray on this "
                f"machine again (`ray start --address={address}`), and continue with --resume",
                True,
            )
            return
    lost(
        f"the Ray head at {address} has not answered for {seconds:.0f} s. The run's processes end "
        "after a checkpoint; start the cluster again, and continue with --resume",
        False,
    )
