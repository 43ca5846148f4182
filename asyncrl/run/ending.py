"""Wait until processes have ended, and kill those that take too long."""

from __future__ import annotations

import time
from collections.abc import Sequence

from asyncrl.launch.config import LauncherConfig
from asyncrl.run.worker import Worker

KILL_SECONDS = 10.0
"""Longest wait for killed processes."""
_POLL_SECONDS = 0.02
"""Time between two looks at processes that are to end."""


def wait_for_end(workers: Sequence[Worker], limits: LauncherConfig) -> dict[str, float]:
    """Wait until all have ended; those that exceeded their limit, and after how many seconds.

    Each gets `launcher.stop_seconds`, the trainer `launcher.checkpoint_seconds` more. Then it is
    killed.
    """
    began = time.monotonic()
    remaining = list(workers)
    killed: dict[str, float] = {}
    while remaining:
        remaining = [worker for worker in remaining if worker.handle.exit_code() is None]
        waited = time.monotonic() - began
        for worker in remaining:
            extra = limits.checkpoint_seconds if worker.is_trainer else 0.0
            if waited > limits.stop_seconds + extra and worker.name not in killed:
                worker.handle.end(by_force=True)
                killed[worker.name] = waited
        if any(waited - killed.get(one.name, waited) > KILL_SECONDS for one in remaining):
            break
        time.sleep(_POLL_SECONDS)
    return killed
