"""Reward pools with real worker processes, and what their processes have left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl.rewards.config import RewardConfig
from asyncrl.rewards.pool import RewardPool


@asynccontextmanager
async def running(*functions: dict[str, Any], **values: Any) -> AsyncIterator[RewardPool]:
    """A started pool with these functions and settings; closed at the end."""
    pool = RewardPool(RewardConfig.model_validate({"functions": functions, **values}))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie that waits for its reaper does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended while it was read
        return False
    return state not in "ZX"


def parent_of(pid: int) -> int:
    """The process id of a process's parent; a reward worker's is its supervisor."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


async def until_gone(pid: int) -> None:
    """Wait until a process has ended."""
    async with asyncio.timeout(60):
        while alive(pid):  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.01)
