"""Orders processes to end, waits for them, and kills those that take too long."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from msgspec import Struct

from asyncrl.config.launcher import LauncherConfig
from asyncrl.errors import RunFailed, WaitTimeout
from asyncrl.fleet.process_state import TrainerRank, Worker
from asyncrl.fleet.relays import Relays
from asyncrl.launch.child_spec import Role
from asyncrl.wire import Hub, Unreachable
from asyncrl.wire.messages import to_generator, to_relay, to_trainer

STOP_SECONDS = 60.0
"""Longest wait for a process to end after the request. Then it is killed."""
KILL_SECONDS = 10.0
_ATTEND_SECONDS = 0.2
_POLL_SECONDS = 0.02

_SHUTDOWN: dict[Role, Struct] = {
    "trainer": to_trainer.Shutdown(checkpoint=True),
    "generator": to_generator.Shutdown(),
    "relay": to_relay.Shutdown(),
}


async def end_all(
    workers: Sequence[Worker], hub: Hub[Any], limits: LauncherConfig, *, told: bool
) -> dict[str, float]:
    """End these unless they were ordered or killed before, and wait. Returns as `wait_for_end`."""
    for worker in () if told else workers:
        try:
            if not worker.is_ready:
                worker.handle.end(by_force=False)
            else:
                await hub.send(worker.name, _SHUTDOWN[worker.role])
        except Unreachable:
            worker.handle.end(by_force=False)
    return await asyncio.to_thread(wait_for_end, workers, limits)


def wait_for_end(workers: Sequence[Worker], limits: LauncherConfig) -> dict[str, float]:
    """Wait until all have ended; return those that exceeded their limit, and the seconds.

    Each gets `STOP_SECONDS`, the trainer twice `launcher.checkpoint_seconds` more: for a checkpoint
    that it is writing, and for the last one. Then it is killed.
    """
    began = time.monotonic()
    remaining = list(workers)
    killed: dict[str, float] = {}
    while remaining:
        remaining = [worker for worker in remaining if worker.handle.exit_code() is None]
        waited = time.monotonic() - began
        for worker in remaining:
            extra = 2 * limits.checkpoint_seconds if isinstance(worker, TrainerRank) else 0.0
            if waited > STOP_SECONDS + extra and worker.name not in killed:
                worker.handle.end(by_force=True)
                killed[worker.name] = waited
        if any(waited - killed.get(one.name, waited) > KILL_SECONDS for one in remaining):
            break
        time.sleep(_POLL_SECONDS)
    return killed


def raise_if_late(killed: Mapping[str, float], left: str) -> None:
    """Raise WaitTimeout if processes had to be killed, or files were left on other nodes."""
    said = [left] if left else []
    if killed:
        late = (
            f"{', '.join(killed)} did not end within {max(killed.values()):.0f} s and were "
            f"killed (the limit is {STOP_SECONDS:g} s, for the trainer twice "
            "launcher.checkpoint_seconds more)"
        )
        said = [late, *said]
    if said:
        raise WaitTimeout(". ".join(said))


@asynccontextmanager
async def attended(
    hub: Hub[Any], relays: Relays, is_over: Callable[[], bool], workers: Sequence[Worker]
) -> AsyncIterator[None]:
    """Receive ending processes' messages, and replace their relays until `is_over` is True."""

    async def attend() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hub.attend())
            while True:
                await asyncio.sleep(_ATTEND_SECONDS)
                for relay in relays.alive:
                    relay.is_gone = relay.handle.exit_code() is not None
                living = [one for one in workers if one.handle.exit_code() is None]
                with suppress(RunFailed):  # none is replaced any more; others are killed in time
                    relays.start_missing([] if is_over() else [one.node for one in living])

    if not relays.are_used:
        yield
        return
    attending = asyncio.create_task(attend())
    try:
        yield
    finally:
        attending.cancel()
